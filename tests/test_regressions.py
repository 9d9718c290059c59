"Wrong answers that a newcomer once got without an error"
import csv, json, re, numpy as np, pandas as pd, pytest, torch
from pathlib import Path
from PIL import Image
from fastai.vision.all import ImageDataLoaders, MixUp, Resize, aug_transforms, get_image_files, noop, set_seed
from hierproto.all import *
from hierproto.audit import Predictions, read_predictions, write_text
from hierproto.compare import Pool, compare
from hierproto.stats import judge
from hierproto.images import (ImageError, check_classes, file_digests, image_files, image_table, image_tensor,
                              keep_classes, read_image, tensor_dls)
from hierproto.paper.data.common import hold_out
from hierproto.baselines.hxe import HXELoss
from hierproto.features import FeatureDS, features
from hierproto.cli import compare_command, fit
from hierproto.predict import _given
from hierproto.prototypes import DataLoss, FocalDataLoss
from hierproto.inference import BackOff, Decide, back_off, class_path
from hierproto.learner import use_rule
from hierproto.metrics import coverage, error_rate, specificity
from hierproto.saving import ModelError, Predictor


def write(folder, n=6, size=40, seed=0):
    rng = np.random.default_rng(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (size,size,3), dtype=np.uint8)).save(Path(folder)/f'{i}.png')
    return Path(folder)


@pytest.fixture
def pictures(tmp_path):
    for k,o in enumerate('abc'): write(tmp_path/'images'/o, seed=k)
    return tmp_path/'images'


def test_saved_models_resize_twice_as_fastai_does(pictures, tmp_path):
    "Items to 96 pixels, then batches to 32: the saved model must see the same pixels"
    set_seed(0)
    dls = ImageDataLoaders.from_folder(pictures, valid_pct=.5, seed=0, bs=4, num_workers=0, item_tfms=Resize(96),
                                       batch_tfms=aug_transforms(size=32))
    learn = hier_learner(dls, 'convnet', Hierarchy.from_paths([*'abc']), 'learnt', m=4, pretrained=False)
    with learn.no_bar(): scores,_ = learn.get_preds(act=noop)
    p = load_classifier(save_classifier(learn, tmp_path/'model'))
    assert torch.allclose(p.scores(list(dls.valid_ds.items)), scores, atol=1e-4)
    assert p.settings['images']['presize']==[96,96]


def test_subset_keeps_pictures_of_a_name_that_becomes_unique(tmp_path):
    for o in ('a/x','c/y','c/z'): write(tmp_path/'images'/o, 12)
    (tmp_path/'classes.csv').write_text('group,class\na,x\nb,x\nc,y\nc,z\n')
    p = fit(str(tmp_path/'images'), str(tmp_path/'classes.csv'), str(tmp_path/'model'), epochs=1, subset=True,
            quiet=True, arch='convnet', size=32)
    assert p.h.leaves==['x','y','z'] and torch.bincount(p.targets, minlength=3).tolist()==[2,2,2]


def test_a_class_with_test_pictures_only(tmp_path):
    for o in ('train/a','train/b','test/a','test/b','test/c'): write(tmp_path/o)
    h = Hierarchy.from_paths([('g','a'), ('g','b'), ('k','c')])
    t = image_table(tmp_path, h)
    assert {*keep_classes(t, check_classes(t, h, True)).label}=={'a','b'}
    dls = features(tmp_path, 'convnet', pretrained=False, size=32, h=h, subset=True, file=tmp_path/'f.safetensors',
                   progress=False)
    assert list(dls.vocab)==['a','b'] and [len(o.dataset) for o in dls.loaders]==[12,12]


def test_collapse_keeps_groups_apart():
    h = Hierarchy.from_paths([('A','G','a'), ('A','G','b'), ('B','G','c'), ('B','G','d'), ('C','x'), ('C','y')])
    assert (h.costs()[0,2], h.collapse().costs()[0,2], h.collapse().costs()[0,1])==(6, 4, 2)


@pytest.mark.parametrize('how', ['lists','frame'])
def test_features_notice_changed_pictures(pictures, how, tmp_path):
    def feats():
        fs = get_image_files(pictures).sorted()
        kw = dict(bs=4, num_workers=0, item_tfms=Resize(32), valid_pct=.5, seed=0)
        labels = [f.parent.name for f in fs]
        df = pd.DataFrame(dict(name=[str(f.relative_to(pictures)) for f in fs], label=labels))
        dls = (ImageDataLoaders.from_lists(pictures, list(fs), labels, **kw) if how=='lists'
               else ImageDataLoaders.from_df(df, pictures, fn_col='name', label_col='label', **kw))
        torch.manual_seed(0)
        return features(dls, 'convnet', pretrained=False, size=32, progress=False,
                        file=tmp_path/'f.safetensors').train.dataset.x.clone()
    before = feats()
    assert torch.equal(feats(), before)
    for k,o in enumerate('abc'): write(pictures/o, seed=k+10)
    assert not torch.equal(feats(), before)


def test_decisions_do_not_depend_on_the_batch():
    "A row of scores that happens to sum to one is still a row of scores"
    D,s = CostMatrix([[0,1.],[2,0]], warn=False),torch.tensor([[.28,.72],[2.,-1.]])
    model = Decide(torch.nn.Identity(), CRM(D))
    assert model(s).tolist()==[model(o[None]).item() for o in s]


def test_metrics_and_interpretation_follow_the_rule_of_the_method(tmp_path):
    torch.manual_seed(0)
    x,y = torch.rand(40, 1, 28, 28),torch.randint(3, (40,))
    dls = tensor_dls((x,y), (x,y), ['a','b','c'], bs=16, device='cpu')
    D = CostMatrix([[0,1,9.],[9,0,9],[1,1,0]], ['a','b','c'], warn=False)
    learn = hier_learner(dls, 'convnet', D, 'cross_entropy_crm', m=2, n_in=1, pretrained=False)
    with learn.no_bar():
        scores,_ = learn.get_preds(act=noop)
        shown = dict(zip([m.name for m in learn.metrics], learn.validate()[1:]))
    want = D.D[crm(scores, D, probs=False), y].mean().item()
    assert abs(shown['average_cost']-want)<1e-5
    with learn.no_bar(): assert torch.equal(HierInterpretation.from_learner(learn).decoded, crm(scores, D, probs=False))


def test_ignored_labels_with_mixup():
    x,y = torch.rand(32, 1, 28, 28),torch.randint(3, (32,))
    y[::4] = 255
    dls = tensor_dls((x,y), (x,y), ['a','b','c'], bs=16, device='cpu')
    learn = hier_learner(dls, 'convnet', Hierarchy.from_paths([*'abc']), m=2, n_in=1, pretrained=False,
                         ignore_index=255)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=MixUp(.4))


def test_haframe_with_costs_that_need_a_fast_decay(tmp_path):
    B = np.array([[0,9,1,1],[9,0,1,1],[1,1,0,1],[1,1,1,0.]])
    x,y = torch.rand(16, 1, 28, 28),torch.arange(16)%4
    dls = tensor_dls((x,y), (x,y), list('abcd'), bs=8, device='cpu')
    learn = hier_learner(dls, 'convnet', CostMatrix(B, list('abcd'), warn=False), 'haframe', m=5, n_in=1,
                         pretrained=False, decay=12.)
    with learn.no_bar(): scores,_ = learn.get_preds(act=noop)
    assert torch.allclose(load_classifier(save_classifier(learn, tmp_path/'m')).scores(x), scores, atol=1e-4)


def test_compare_takes_a_plain_matrix():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(60)%3
    x = torch.randn(60, 8, generator=g) + 3*torch.eye(8)[y]
    res = compare(Pool(x, y, ['a','b','c']), 1-torch.eye(3), ['learnt'], seeds=2, progress=False, epochs=1)
    assert res.levels().columns.tolist()==['class']


@pytest.mark.parametrize('text', ['file\nx.png\n', 'file,target\n"x,y.png",a\n', 'file;target\nx,y.png;a\n'])
def test_lists_of_files(tmp_path, text):
    (tmp_path/'list.csv').write_text(text)
    assert [Path(f).name for f,*_ in _given(str(tmp_path/'list.csv'))]==['x.png' if 'x.png' in text else 'x,y.png']


def test_jsonl_with_numbers_and_blank_lines(tmp_path):
    from hierproto.audit import read_predictions
    rows = [dict(file=f'{k}/p.png', target=k, prediction=1) for k in (1,2)]
    (tmp_path/'p.jsonl').write_text('\n'.join(map(json.dumps, rows))+'\n\n')
    p = read_predictions(tmp_path/'p.jsonl', Hierarchy.from_paths([1, 2]))
    assert p.targets.tolist()==[0,1] and p.preds.tolist()==[0,0]


def test_estimator_with_rows_of_paths():
    from hierproto.estimator import HierarchicalClassifier
    rng = np.random.default_rng(0)
    rows = [['low','0'],['high','0'],['high','1']]*20
    X = rng.normal(size=(60,4))+3*np.eye(4)[np.arange(60)%3]
    clf = HierarchicalClassifier(epochs=10, random_state=0).fit(X, rows)
    assert clf.classes_.tolist()==['1','high/0','low/0'] and clf.score(X, rows)>.9
    with pytest.raises(ValueError, match="y: no class is called 'high/2'"): clf.score(X[:1], [['high','2']])


# --- found by the second newcomer ---
def stopped_fit(pictures, tmp_path, monkeypatch, n=1, **kw):
    "Start a fit, interrupt it after `n` epochs; returns a function that resumes it"
    from hierproto import fit as module
    classes = tmp_path/'classes.csv'
    classes.write_text('group,class\ng,a\ng,b\nk,c\n')
    def go(**more):
        return fit(str(pictures), str(classes), str(tmp_path/'model'),
                   **{**dict(epochs=3, arch='convnet', size=32, m=4, quiet=True), **kw, **more})
    after_epoch = module.Checkpoint.after_epoch
    def stop(self):
        after_epoch(self)
        if self.done==n: raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(module.Checkpoint, 'after_epoch', stop)
        with pytest.raises(KeyboardInterrupt, match=f'after epoch {n}'): go()
    return lambda **more: go(resume=True, **more)


def test_resume_refuses_other_classes(pictures, tmp_path, monkeypatch):
    resume = stopped_fit(pictures, tmp_path, monkeypatch)
    (tmp_path/'classes.csv').write_text('group,class\nk,c\ng,b\ng,a\n') # the same classes in another order
    with pytest.raises(ModelError, match='changed: classes'): resume()


def test_resume_refuses_other_images_and_methods(pictures, tmp_path, monkeypatch):
    resume = stopped_fit(pictures, tmp_path, monkeypatch)
    with pytest.raises(ModelError, match='changed: --method'): resume(method='learnt')
    # as many, of the same names
    (pictures/'a').rename(pictures/'x'), (pictures/'b').rename(pictures/'a'), (pictures/'x').rename(pictures/'b')
    with pytest.raises(ModelError, match='changed: images'): resume()
    (pictures/'a').rename(pictures/'x'), (pictures/'b').rename(pictures/'a'), (pictures/'x').rename(pictures/'b')
    assert len(resume().targets)==3


def test_trackers_keep_the_lowest_cost():
    import fastai.callback.tracker as trackers
    dls = tensor_dls((torch.randn(32, 4), torch.arange(32)%4), (torch.randn(8, 4), torch.arange(8)%4), [*'abcd'], bs=8)
    h = Hierarchy.from_paths([('g','a'), ('g','b'), ('k','c'), ('k','d')])
    learn = hier_learner(dls, torch.nn.Identity(), h, m=4, pretrained=False)
    with learn.no_bar(), learn.no_logging():
        for cb in (trackers.EarlyStoppingCallback, trackers.ReduceLROnPlateau):
            with pytest.raises(ValueError, match='lower is better: pass `comp=np.less`'):
                learn.fit(1, cbs=cb(monitor='average_cost'))
            learn.fit(1, cbs=cb(monitor='average_cost', comp=np.less))
        learn.fit(1, cbs=trackers.EarlyStoppingCallback(monitor='level_1_accuracy'))


def test_fastai_predictions_follow_the_rule_of_the_method():
    set_seed(0)
    x,y = torch.randn(64, 4)+torch.eye(4).repeat(16, 1),torch.arange(64)%4
    dls = tensor_dls((x,y), (x,y), [*'abcd'], bs=32)
    h = CostMatrix(torch.tensor([[0.,1,1,1], [1,0,1,1], [9,9,0,9], [9,9,9,0]]), [*'abcd'], warn=False)
    learn = hier_learner(dls, torch.nn.Identity(), h, 'cross_entropy_crm', m=4, pretrained=False)
    with learn.no_bar():
        scores,_ = learn.get_preds(act=noop)
        probs,_,decoded = learn.get_preds(with_decoded=True)
        raw = learn.get_preds(act=noop, with_decoded=True)[2]
    assert (torch.equal(decoded, learn.rule(scores)) and torch.equal(raw, decoded)
            and not torch.equal(decoded, scores.argmax(1)))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_decisions_and_losses_in_half_precision(dtype):
    torch.manual_seed(0)
    h,x = Hierarchy.named('cifar100'),torch.randn(2000, 100)*2
    with torch.autocast('cpu', dtype=dtype): assert torch.equal(crm(x, h, probs=False), crm(x.double(), h, probs=False))
    x,y = (x*3).to(dtype),torch.arange(2000)%100
    for loss in (DataLoss, FocalDataLoss):
        assert torch.equal(loss(reduction='none')(x, y), loss(reduction='none')(x.float(), y))
    assert DataLoss()(x, y[:,None])==DataLoss()(x, y) # targets of tables


def test_the_sampled_guide_forgets_its_scale_between_trainings():
    dls = tensor_dls((torch.randn(32, 4), torch.arange(32)%4), (torch.randn(8, 4), torch.arange(8)%4), [*'abcd'], bs=8)
    learn = proto_learner(dls, torch.nn.Identity(), Hierarchy.from_paths([*'abcd']), guide='sampled', m=4,
                          pretrained=False)
    with learn.no_bar(), learn.no_logging():
        for _ in range(2): learn.fit(1)
    assert learn.metric_guide.guide.keywords['scale'].seen==5 # four batches, and one draw to begin with


def test_compare_refuses_rules_and_seeds_before_training():
    pool = Pool(torch.randn(40, 3), torch.arange(40)%2, ['a','b'])
    for bad in (dict(rules='argmaxx'), dict(rules=['nonsense'])):
        with pytest.raises(ValueError, match='unknown rule'): compare(pool, Hierarchy.from_paths([*'ab']), **bad)
    with pytest.raises(ValueError, match='seeds must be >= 1, got 0'):
        compare(pool, Hierarchy.from_paths([*'ab']), seeds=0)
    with pytest.raises(ValueError, match='nothing to compare'):
        compare(pool, Hierarchy.from_paths([*'ab']), 'cross_entropy', rules='argmax')
    res = compare(pool, Hierarchy.from_paths([*'ab']), ['learnt'], seeds=1, rules='argmax', epochs=1, progress=False)
    assert res.advice().endswith('One repetition cannot show how much trainings differ: use two or more.')


def test_a_size_that_is_too_small_for_the_network(pictures, tmp_path):
    (tmp_path/'classes.csv').write_text('class\na\nb\nc\n')
    with pytest.raises(ModelError, match='use a larger --size'):
        fit(str(pictures), str(tmp_path/'classes.csv'), str(tmp_path/'model'), arch='convnet', size=8, quiet=True)


# --- found by reading the code ---
def test_features_notice_changed_labels(tmp_path):
    x,y = torch.randint(256, (1100,3,32,32), dtype=torch.uint8),torch.arange(1100)%2
    def labels(y):
        return features(tensor_dls((x,y), (x[:4],y[:4]), ['a','b']), 'convnet', pretrained=False, weights=None, size=32,
                        file=tmp_path/'f.safetensors', progress=False).train_ds.y
    set_seed(0)
    first = labels(y)
    other = y.clone()
    other[400:600] = 1-other[400:600]
    set_seed(0)
    assert torch.equal(labels(other), other) and not torch.equal(first, other)


def test_a_group_with_the_name_of_a_class(tmp_path):
    from hierproto.audit import read_predictions
    h = Hierarchy.from_paths([('fox','fox'), ('fox','arctic fox'), ('dog','dog')])
    names = h.node_names()
    assert sorted(names[3:])==['/','dog/','fox/']
    (tmp_path/'p.csv').write_text('target,prediction\nfox,fox/\nfox,fox\n')
    p = read_predictions(tmp_path/'p.csv', h)
    assert p.preds.tolist()==[names.index('fox/'),0] and p.wrong.tolist()==[True,False]


def test_constant_columns_stay_constant():
    g = np.random.default_rng(0)
    X,y = g.normal(size=(90,2)),np.arange(90)%3
    X = np.c_[X+y[:,None]*3, np.full(90, .1)]
    m = HierarchicalClassifier(epochs=20, random_state=0).fit(X, y)
    assert (m.predict(X+[0,0,1e-9])==m.predict(X)).all()


def test_floats_for_bytes():
    ds = tensor_dls((torch.zeros(4,1,2,2, dtype=torch.uint8), torch.zeros(4).long()),
                    (torch.zeros(2,1,2,2, dtype=torch.uint8), torch.zeros(2).long()), ['a'], bs=2).train_ds
    assert ds.new([torch.full((1,2,2), .5)]).x.tolist()==[[[[128,128],[128,128]]]]


def test_pictures_of_16_bits_are_left_out(pictures, tmp_path):
    Image.fromarray(np.full((40,40), 40000, dtype=np.uint16)).save(pictures/'a'/'deep.png')
    with pytest.warns(UserWarning, match='deep.png'):
        dls = features(pictures, 'convnet', pretrained=False, size=32, file=tmp_path/'f.safetensors', progress=False)
    assert sum(len(o.dataset) for o in dls.loaders)==18


def test_rows_with_other_columns_are_refused(tmp_path):
    from hierproto.files import add_row, read_rows
    add_row(tmp_path/'r.csv', dict(run_id='a', er=.1), ['run_id','er'])
    with pytest.raises(ValueError, match='no column for er_crm'):
        add_row(tmp_path/'r.csv', dict(run_id='b', er=.1, er_crm=.2), ['run_id','er'])
    assert len(read_rows(tmp_path/'r.csv'))==1


def test_little_data_keeps_pretrained_features():
    from hierproto.paper.recipes import explain, resolve, sweep_recipes
    r = resolve('nyudv2', 'gp_disto', 'features', fraction=.1)
    assert r['pretrained'] and 'pretrained True                     tier features' in explain(r)
    assert len(sweep_recipes('digits', 'learnt', tier='cpu', runs=2))==2


def test_no_cell_becomes_a_formula(tmp_path):
    from hierproto.files import write_text
    cells = ["-1+cmd|' /C calc'!A0", '-1.5e-3', '+2', '-', '=1']
    write_text(tmp_path/'cells.csv', pd.DataFrame({'cell': cells}))
    with open(tmp_path/'cells.csv', newline='') as f: written = [row[0] for row in csv.reader(f)]
    assert written==['cell', "'-1+cmd|' /C calc'!A0", '-1.5e-3', '+2', "'-", "'=1"]


def test_a_comparison_with_few_images_per_class():
    y = torch.arange(50)%10
    state = torch.get_rng_state()
    res = compare(Pool(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), y, list('abcdefghij')),
                  Hierarchy.from_paths([*'abcdefghij']), ['learnt'], seeds=1, epochs=1, progress=False)
    assert len(res.rows)==6 and torch.equal(torch.get_rng_state(), state)


def test_no_cost_is_no_evidence():
    from hierproto.stats import t_interval
    assert t_interval([np.inf, np.inf, np.inf])[3]==1


def test_force_leaves_other_checkpoints(pictures, tmp_path):
    (tmp_path/'classes.csv').write_text('class\na\nb\nc\n')
    (tmp_path/'model').mkdir()
    (tmp_path/'model'/'mine.ckpt').write_text('mine')
    fit(str(pictures), str(tmp_path/'classes.csv'), str(tmp_path/'model'), epochs=1, arch='convnet', size=32,
        quiet=True, force=True)
    assert [f.name for f in (tmp_path/'model').glob('*.ckpt')]==['mine.ckpt']


def test_confusions_of_labels_in_bytes():
    x,y = torch.eye(20).repeat(10, 1),(torch.arange(200)%20).to(torch.uint8)
    dls = tensor_dls((x,y), (x,y), [f'c{k:02}' for k in range(20)], bs=50)
    learn = hier_learner(dls, torch.nn.Identity(), Hierarchy.from_paths([f'c{k:02}' for k in range(20)]),
                         'cross_entropy', m=20, pretrained=False)
    with torch.no_grad():
        (learn.model[0][-1].weight.copy_(torch.eye(20)), learn.model[0][-1].bias.zero_(),
         learn.model[1].weight.copy_(torch.eye(20)), learn.model[1].bias.zero_())
    with learn.no_bar(): assert HierInterpretation.from_learner(learn).confusion_matrix().trace()==200


def test_rates_of_prototypes_end_with_their_training():
    dls = tensor_dls((torch.randn(8, 4), torch.arange(8)%4), (torch.randn(8, 4), torch.arange(8)%4), [*'abcd'], bs=8)
    learn = proto_learner(dls, torch.nn.Identity(), Hierarchy.from_paths([*'abcd']), m=4, pretrained=False)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0., cbs=ProtoRates(wd=0.))
    assert 'do_wd' not in learn.opt.state[learn.model[1].protos]


def test_plots_of_prototypes_follow_the_vocabulary():
    from hierproto.interpret import PrototypePlot
    dls = tensor_dls((torch.randn(6, 2), torch.arange(6)%3), (torch.randn(6, 2), torch.arange(6)%3),
                     ['a','b','c'], bs=3)
    h = Hierarchy.from_paths([('y','c'), ('x','b'), ('x','a')])
    learn = proto_learner(dls, torch.nn.Identity(), h, m=2, pretrained=False, cbs=PrototypePlot(h=h))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.prototype_plot.h.leaves==['a','b','c']


def test_a_head_that_is_named_is_used():
    dls = tensor_dls((torch.randn(6, 2), torch.arange(6)%3), (torch.randn(6, 2), torch.arange(6)%3),
                     ['a','b','c'], bs=3)
    h = Hierarchy.from_paths([*'abc'])
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one,self.other = PrototypeHead(2, h),PrototypeHead(2, h)
        def forward(self, x): return self.one(x)+self.other(x)
    from fastai.learner import Learner
    model = Two()
    learn = Learner(dls, model, DataLoss(), cbs=MetricGuide(h, head=model.other))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.metric_guide.found is model.other


def test_cost_matrices_from_frames_and_doubles():
    df = pd.DataFrame([[0,1,2],[1,0,3],[2,3,0.]], list('abc'), list('abc'))
    assert CostMatrix(df, ['c','b','a'], warn=False).D[0].tolist()==[0,3,2]
    assert CostMatrix(df, ['x','y','z'], warn=False).D[0].tolist()==[0,1,2]
    D = CostMatrix(torch.tensor([[0,.1],[.1,0]], dtype=torch.float64), ['a','b'])
    assert D==CostMatrix(torch.tensor([[0,.1],[.1,0]]), ['a','b'])


def test_weights_that_contradict_each_other():
    df = pd.DataFrame({'g': ['a ','a'], 'c': ['x','y'], 'weight:g': [2,3]})
    with pytest.raises(ValueError, match='weighs 3 here and 2 before'): Hierarchy.from_csv(df)


def test_metrics_that_need_scores():
    h = Hierarchy.from_paths([*'abc'])
    y = torch.tensor([0,1,2])
    with pytest.raises(ValueError, match='needs scores'): hier_report(y, y, h, ['hier_dist_at_k'])
    tree = Hierarchy.from_paths([('g','a'), ('g','b'), ('k','c')], level_names=['calibration','class'])
    assert 'calibration_accuracy' in hier_report(y, y, tree)


def test_a_folder_with_the_name_of_a_tree(tmp_path, monkeypatch):
    from hierproto.hierarchy import read_hierarchy
    (tmp_path/'cifar100').mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(read_hierarchy('cifar100'))==100


def test_networks_with_channels_last_maps():
    from hierproto.body import embedder
    body = embedder('swin_tiny_patch4_window7_224', 4)
    assert body(torch.zeros(2, 3, 224, 224)).shape==(2,4)


def test_empty_input():
    h = Hierarchy.from_paths([('g','a'), ('g','b'), ('k','c')])
    assert PrototypeHead(4, h)(torch.zeros(0, 4, 5, 6)).shape==(0,3,5,6)
    assert h.pair_costs([], []).tolist()==[]


def test_a_misspelt_architecture_is_suggested_once():
    "torchvision and timm both have a resnet18"
    from hierproto.body import arch_func
    with pytest.raises(ValueError) as e: arch_func('resnet81')
    near = re.findall("'(.*?)'", str(e.value).split('mean')[1])
    assert 'resnet18' in near and len(near)==len({*near})


def test_features_without_a_validation_set(pictures, tmp_path):
    dls = features(pictures, 'convnet', False, size=32, valid_pct=0, file=tmp_path/'f.safetensors', progress=False)
    assert len(dls.train_ds.items)==18 and len(dls.valid_ds.items)==0


def test_features_notice_how_pictures_are_opened(pictures, tmp_path):
    "The same files, in colour, in grey, and cropped"
    from fastai.vision.all import (CategoryBlock, DataBlock, PILImage, PILImageBW, RandomSplitter, TransformBlock,
                                   parent_label)
    def corner(im): return im.crop((0,0,12,12))
    def key(file, *tfms):
        block = DataBlock((TransformBlock(type_tfms=[*tfms]),CategoryBlock), get_items=get_image_files,
                          get_y=parent_label, splitter=RandomSplitter(seed=0), item_tfms=Resize(32))
        dls = block.dataloaders(pictures, bs=4, num_workers=0)
        return features(dls, 'convnet', False, size=32, file=tmp_path/file, progress=False).features['key']
    set_seed(0)
    keys = [key('a', PILImage.create), key('b', PILImageBW.create), key('c', PILImage.create, corner)]
    assert len({*keys})==3


def tiny(method='cross_entropy', h=None, n=80, **kwargs):
    "A learner for vectors of the classes a, b, c and d, with scores that differ"
    set_seed(0)
    x,y = torch.randn(n, 6),torch.arange(n)%4
    dls = tensor_dls((x,y), (x,y), [*'abcd'], bs=16, device='cpu')
    h = Hierarchy.from_paths([('g','a'), ('g','b'), ('k','c'), ('k','d')]) if h is None else h
    return hier_learner(dls, torch.nn.Linear(6, 4), h, method, m=4, pool=False, project=False, **kwargs)


def test_rules_that_cannot_be_saved(tmp_path):
    from hierproto.inference import CRM
    from hierproto.learner import use_rule
    learn = tiny('cross_entropy_crm')
    assert Predictor.from_learner(learn).settings['rule']=='crm'
    D = torch.ones(4, 4).fill_diagonal_(0)
    D[0] *= 9
    for rule in (CRM(D), lambda scores, probs=False: scores.argmin(1)):
        use_rule(learn, rule)
        with pytest.raises(ModelError, match='decision rule cannot be saved'): save_classifier(learn, tmp_path/'m')


def test_a_custom_loss_and_the_metrics():
    from fastai.vision.all import CrossEntropyLossFlat
    learn = tiny(loss_func=CrossEntropyLossFlat(ignore_index=0))
    with learn.no_bar():
        value = learn.validate()[1]
        scores,y = learn.get_preds(act=noop)
    assert value==pytest.approx((scores.argmax(1)!=y)[y!=0].float().mean().item())
    with pytest.raises(TypeError, match='weight would be lost'):
        tiny(loss_func=CrossEntropyLossFlat(), weight=[1.,9,1,1])


def test_compare_notices_changed_labels(tmp_path):
    set_seed(0)
    x,y = torch.randn(80, 6),torch.arange(80)%4
    dls = tensor_dls((x,y), (x,y), [*'abcd'], bs=16, device='cpu')
    dls.features = dict(key='0'*16)
    before = Pool.from_dls(dls).digest
    dls.train.dataset.y = y.flip(0)
    assert Pool.from_dls(dls).digest!=before


def test_a_divisor_other_than_255(pictures):
    from fastai.vision.all import IntToFloatTensor
    dls = ImageDataLoaders.from_folder(pictures, valid_pct=.5, seed=0, bs=4, num_workers=0, item_tfms=Resize(32),
                                       batch_tfms=[IntToFloatTensor(div=127.5)])
    learn = hier_learner(dls, 'convnet', Hierarchy.from_paths([*'abc']), 'learnt', m=4, pretrained=False)
    with pytest.warns(UserWarning, match='div=127.5'): Predictor.from_learner(learn)


def test_names_of_a_frame_that_are_numbers():
    D = pd.DataFrame([[0,1,2],[3,0,4],[5,6,0]], [2,0,1], [2,0,1])
    assert CostMatrix(D, ['0','1','2'], warn=False)[0,1]==D.loc[0,1]==4


def test_the_audit_reads_paths_of_folders(tmp_path):
    "Two classes are called bank; the outermost folder has the name of another class"
    h = Hierarchy.from_paths([('seats','bank'), ('houses','bank'), ('houses','villa')])
    (tmp_path/'p.csv').write_text('file,prediction\nvilla/photos/houses/bank/1.jpg,seats/bank\n')
    p = read_predictions(tmp_path/'p.csv', h)
    assert p.targets.tolist()==[1] and p.preds.tolist()==[0]


def test_lists_with_two_files_for_a_path(tmp_path, monkeypatch):
    for o in ('.','lists'): write(tmp_path/o/'sub', 1)
    (tmp_path/'lists'/'l.csv').write_text('file\nsub/0.png\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='use absolute paths'): _given('lists/l.csv')
    monkeypatch.chdir(tmp_path/'lists')
    assert _given('l.csv')==[('sub/0.png',None,'sub/0.png')]


def test_answers_that_are_groups_are_no_evidence_for_the_tree():
    h = Hierarchy.from_paths([(f'g{k//3}',f'c{k}') for k in range(60)])
    y = torch.arange(41)
    p = Predictions(y, h, torch.tensor([h.nodes.index((f'g{k//3}',)) for k in range(40)]+[41]))
    assert 'Too few mistakes (1)' in p.tree_fit(n=50).says


def test_costs_whose_first_cell_says_ground_truth(tmp_path):
    for o in ('ground truth','y_true','True class'):
        (tmp_path/'c.csv').write_text(f'{o},a,b\na,0,1\nb,2,0\n')
        assert CostMatrix.from_csv(tmp_path/'c.csv', warn=False)[0,1]==2


def test_labels_without_names_and_classes_called_by_numbers():
    "Leaf '1' comes first in this tree; a label 1 means it all the same"
    h = Hierarchy.from_paths([('odd','1'), ('even','0'), ('even','2')])
    dls = tensor_dls((torch.rand(12, 4), torch.arange(3).repeat(4)), (torch.rand(3, 4), torch.arange(3)), None, bs=6)
    learn = hier_learner(dls, torch.nn.Identity(), h, 'learnt', m=4, pretrained=False)
    assert learn.hierarchy.leaves==['0','1','2']


def test_two_learners_with_one_loss():
    "The decision rule of the second must not become that of the first"
    h,loss = Hierarchy.from_paths([('g','a'), ('g','b'), ('c',)]),DataLoss()
    x,y = torch.rand(12, 4),torch.arange(3).repeat(4)
    dls = tensor_dls((x,y), (x[:3],y[:3]), h.leaves, bs=6)
    make = lambda method: hier_learner(dls, torch.nn.Identity(), h, method, m=4, pretrained=False, loss_func=loss)
    scores = torch.tensor([[.33,.32,.35]]).log()
    for first,second in (('cross_entropy','cross_entropy_crm'), ('cross_entropy_crm','cross_entropy')):
        learners = {o: make(o) for o in (first,second)}
        answers = {o: learners[o].loss_func.decodes(scores).item() for o in learners}
        assert answers==dict(cross_entropy=2, cross_entropy_crm=0)


def test_equal_differences_are_no_evidence():
    "Two seeds with one mistake less out of few: the spread is unknown"
    r = judge({'gp_disto': [-33., -33.]}).iloc[0]
    assert r.verdict=='undecided' and np.isinf([r.low, r.high]).all()


def test_validation_pictures_of_a_class_without_training_pictures_are_counted(tmp_path):
    for o in ('train/a','train/b','test/a','test/b','test/c'): write(tmp_path/'images'/o)
    (tmp_path/'classes.csv').write_text('class\na\nb\nc\n')
    with pytest.warns(UserWarning, match="not used: 6 images of 'c', which have no images to learn from"):
        fit(str(tmp_path/'images'), str(tmp_path/'classes.csv'), str(tmp_path/'model'), epochs=1, subset=True,
            quiet=True, arch='convnet', size=32)


def test_file_names_that_look_like_formulas(tmp_path, monkeypatch):
    "Tables escape them for Excel; a list of files has them back"
    monkeypatch.chdir(tmp_path)
    write_text('list.csv', pd.DataFrame(dict(file=['=b.jpg'])))
    write(tmp_path, 1)
    (tmp_path/'0.png').rename(tmp_path/'=b.jpg')
    assert _given('list.csv')==[('=b.jpg', None, '=b.jpg')]


def test_a_method_that_needs_a_tree_is_refused_before_pictures_are_read(tmp_path):
    (tmp_path/'costs.csv').write_text(',a,b\na,0,1\nb,1,0\n')
    (tmp_path/'images').mkdir() # without images: reading them would be another error
    for command,name in ((fit,'method'), (compare_command,'methods')):
        with pytest.raises(ValueError, match='The method hxe needs a tree'):
            command(str(tmp_path/'images'), str(tmp_path/'costs.csv'), str(tmp_path/'out'), **{name: 'hxe'})


def test_rules_with_the_classes_in_another_order():
    "The tree has zebra first, the data cat: costs matched by position give other answers"
    h = Hierarchy.from_paths([('animal','zebra'), ('animal','cat'), ('plant','oak')])
    x,y = torch.rand(12, 4),torch.arange(3).repeat(4)
    dls = tensor_dls((x,y), (x[:3],y[:3]), ['cat','oak','zebra'], bs=6)
    learn = hier_learner(dls, torch.nn.Identity(), h, 'cross_entropy', m=4, pretrained=False)
    with pytest.raises(HierarchyError, match='another order'): use_rule(learn, CRM(h))
    with pytest.raises(HierarchyError, match='another order'): learn.predict_path(x[0], rule=CRM(h))
    use_rule(learn, CRM(h, dls.vocab))
    with pytest.raises(HierarchyError, match='another order'): use_rule(learn, BackOff(h, .9))


def test_back_off_is_a_full_rule():
    "Metrics and answers follow it; the names that fastai's `predict` gives stay classes"
    h = Hierarchy.from_paths([('animal','zebra'), ('animal','cat'), ('plant','oak')])
    x,y = torch.rand(60, 4),torch.arange(3).repeat(20)
    dls = tensor_dls((x,y), (x,y), ['cat','oak','zebra'], bs=16)
    learn = hier_learner(dls, torch.nn.Identity(), h, 'cross_entropy', m=4, pretrained=False)
    learn.metrics = hier_metrics(h, ['error_rate','average_cost','coverage','specificity'])
    tree = learn.hierarchy
    for rule in ('back_off', BackOff(tree, .5), BackOff(h, .5, dls.vocab)):
        use_rule(learn, rule)
        with learn.no_bar():
            shown = learn.validate()[1:]
            scores,targs,decoded = learn.get_preds(with_decoded=True, act=noop)
        answers = back_off(scores, tree, .5)
        assert (answers>=3).any() and (decoded<3).all()
        want = [error_rate(answers, targs), tree.pair_costs(answers, targs).double().mean(),
                coverage(answers, targs, tree), specificity(answers, tree).mean()]
        assert list(shown)==pytest.approx([o.item() for o in want], abs=1e-6)
        names = [*tree.node_names()[:-1], 'anything']
        assert learn.answers()==[names[i] for i in answers.tolist()]


def test_few_classes_cannot_condemn_a_tree():
    "All mistakes stay inside their group, but a third of all orders of four classes give the same tree"
    h = Hierarchy.from_paths([('animal','cat'), ('animal','dog'), ('plant','oak'), ('plant','elm')])
    y = torch.arange(4).repeat(40)
    preds = torch.where(torch.arange(160)<40, torch.tensor([1,0,3,2])[y], y)
    assert Predictions(y, h, preds).tree_fit().says.startswith('Too few classes')


def test_an_empty_prediction_is_not_an_answer(tmp_path):
    h = Hierarchy.from_paths([('g','a'), ('g','b'), ('c',)])
    (tmp_path/'p.csv').write_text('target,prediction\na,a\nb,\n')
    with pytest.raises(HierarchyError, match='row 2: the cell is empty'): read_predictions(tmp_path/'p.csv', h)
    (tmp_path/'p.csv').write_text('target,prediction\na,a\nb,/\n')
    assert read_predictions(tmp_path/'p.csv', h).preds.tolist()==[0,h.n_nodes-1]


def test_tables_with_empty_lines_and_columns(tmp_path):
    (tmp_path/'p.csv').write_text('\ntarget,prediction,,\na,a,,\nb,a,,\n')
    p = read_predictions(tmp_path/'p.csv', Hierarchy.from_paths([*'ab']))
    assert p.preds.tolist()==[0,0] and p.targets.tolist()==[0,1]


def test_a_division_that_is_not_at_the_top(tmp_path):
    for o in ('train/a','train/b','valid/a','valid/b'): write(tmp_path/'data'/'images'/o, 2)
    with pytest.warns(UserWarning, match="not divided by 'train', 'valid'"):
        image_table(tmp_path/'data', Hierarchy.from_paths([*'ab']))


def test_broken_links_are_counted(tmp_path):
    write(tmp_path/'a', 2)
    (tmp_path/'a'/'lost.png').symlink_to(tmp_path/'nowhere.png')
    with pytest.warns(UserWarning, match='not used: 1 broken link, such as lost.png'): files = image_files(tmp_path)
    assert len(files)==2


def test_a_list_with_an_empty_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path/'a', 1)
    (tmp_path/'lists').mkdir()
    (tmp_path/'lists'/'l.csv').write_text('file,target\na/0.png,a\n,\n')
    assert _given('lists/l.csv')[0]==('a/0.png','a','a/0.png')


def test_rows_of_paths_with_empty_cells():
    X,rows = np.random.default_rng(0).normal(size=(30, 3)),[['animal','cat'], ['animal','dog '], ['rock',np.nan]]*10
    assert HierarchicalClassifier(epochs=1).fit(X, rows).classes_.tolist()==['cat','dog','rock']
    y = np.arange(3, dtype=np.float32).repeat(10)
    h = Hierarchy.from_paths([('even','0'), ('even','2'), ('odd','1')])
    assert HierarchicalClassifier(h, epochs=1).fit(X, y).hierarchy_.leaves==['0','1','2']


def test_a_group_of_masked_classes():
    h = Hierarchy.from_paths([('a','x'), ('a','y'), ('b','z'), ('b','w')])
    s = torch.tensor([[0.,1.,-torch.inf,-torch.inf]], requires_grad=True)
    loss = HXELoss(h, 0.)(s, torch.tensor([0]))
    loss.backward()
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(s, torch.tensor([0]))) and s.grad.isfinite().all()


def test_rules_that_depend_on_the_scores_themselves():
    "A score far below zero is far from all prototypes; a softmax forgets that"
    h,rule = Hierarchy.from_paths([('g','a'), ('g','b'), ('c',)]),lambda s: torch.where(s.amax(1) < -2., 1, s.argmax(1))
    assert class_path(torch.tensor([-3.,-4.,-5.]), h, rule, probs=False).names==['g','b']


def test_features_of_networks_with_equal_weights(pictures, tmp_path):
    conv = torch.nn.Conv2d(3, 4, 3)
    a,b = (features(pictures, torch.nn.Sequential(conv, *more), size=16, file=tmp_path/'f.safetensors', progress=False)
           for more in ((), (torch.nn.ReLU(),)))
    assert (a.train.dataset.x<0).any() and (b.train.dataset.x>=0).all()


def test_features_of_tensors_that_are_not_pictures(tmp_path):
    x,y = torch.rand(6, 3, 16, 16)*255,torch.arange(3).repeat(2)
    dls = tensor_dls((x,y), (x,y), [*'abc'], bs=3)
    with pytest.raises(ValueError, match='between 0 and 1'):
        features(dls, torch.nn.Conv2d(3, 4, 3), size=16, file=tmp_path/'f.safetensors', progress=False)


def test_features_name_unreadable_pictures_again(pictures, tmp_path):
    (pictures/'a'/'bad.png').write_text('broken')
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 image could not be read and are left out: 'a/bad.png'"):
            features(pictures, 'convnet', pretrained=False, size=32, file=tmp_path/'f.safetensors', progress=False)


def test_compare_notices_a_changed_method(tmp_path, monkeypatch):
    x,y = torch.randn(60, 4),torch.arange(3).repeat(20)
    h,nll = Hierarchy.from_paths([('g','a'), ('g','b'), ('c',)]),[]
    for beta in (10.,1.):
        monkeypatch.setitem(METHODS, 'mine', METHODS['soft_labels'].variant(beta=beta))
        res = compare(Pool(x, y, h.leaves), h, 'mine', 1, out=tmp_path, progress=False, epochs=1)
        nll += res.rows.query('method=="mine"').nll.tolist()[:1]
    assert nll[0]!=nll[1]


@pytest.mark.parametrize('x', [torch.randn(12, 3, 16, 16), torch.rand(12, 3, 16, 16)*255])
def test_a_saved_model_of_tensors_that_are_not_pictures(x):
    y = torch.arange(3).repeat(4)
    dls = tensor_dls((x,y), (x,y), [*'abc'], bs=6)
    learn = hier_learner(dls, 'convnet', Hierarchy.from_paths([*'abc']), 'learnt', m=4, pretrained=False)
    with pytest.warns(UserWarning, match='pixels between 0 and 1'): Predictor.from_learner(learn)


def test_pictures_of_another_size(pictures):
    x,y = torch.rand(12, 3, 16, 16),torch.arange(3).repeat(4)
    learn = hier_learner(tensor_dls((x,y), (x,y), [*'abc'], bs=6), 'convnet', Hierarchy.from_paths([*'abc']), 'learnt',
                         m=4, pretrained=False)
    with pytest.raises(ValueError, match=r'\(40, 40\) pixels, the data \(16, 16\)'): learn.predict(pictures/'a'/'0.png')


def test_a_frame_with_other_names():
    frame = pd.DataFrame([[0.,1.,9.],[1.,0.,9.],[9.,9.,0.]], ['cat','dog','oak'], ['cat','dog','oak'])
    with pytest.raises(HierarchyError, match="'dgo'"): CostMatrix(frame, ['cat','oak','dgo'])
    assert CostMatrix(frame, ['x','y','z']).leaves==['x','y','z'] # new names


def test_costs_do_not_follow_their_source():
    D = torch.tensor([[0.,1.],[2.,0.]])
    c = CostMatrix(D, warn=False)
    D[0,1] = 3.
    assert c.costs()[0,1]==1


def test_scores_are_not_probabilities():
    h = Hierarchy.from_paths([*'abc'])
    with pytest.raises(HierarchyError, match='probabilit'): Predictions([0,1], h, probs=torch.tensor([[3.,-1.,0.],[0.,2.,1.]]))


def test_arguments_without_effect_are_refused():
    h,x,y = Hierarchy.from_paths([('g','a'), ('g','b'), ('c',)]),torch.rand(12, 4),torch.arange(3).repeat(4)
    dls = tensor_dls((x,y), (x,y), h.leaves, bs=6)
    make = lambda method, **kw: hier_learner(dls, torch.nn.Identity(), h, method, m=4, pretrained=False, **kw)
    for method,kw in (('learnt',dict(lam=50.)), ('fixed',dict(proto_lr=10.)), ('cross_entropy',dict(proto_wd=1.))):
        with pytest.raises(TypeError, match='no effect'): make(method, **kw)
    make('learnt', guide='disto', lam=2., proto_lr=10.)


def test_losses_and_heads_with_wrong_arguments():
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'avg'"): DataLoss(reduction='avg')
    with pytest.raises(TypeError, match='classes.csv'): PrototypeHead(4, 'classes.csv')
    assert PrototypeHead(4, np.int64(5)).n_classes==5


def test_holding_out_leaves_every_class():
    (_,train),(_,held) = hold_out(torch.rand(11, 2), torch.tensor([0]*10+[1]), .2)
    assert {*train.tolist()}=={0,1} and {*held.tolist()}=={0}


def test_a_hint_for_excel_is_not_a_class(tmp_path):
    (tmp_path/'c.csv').write_text('sep=;\ngroup;class\nanimal;cat\nanimal;dog\n')
    assert read_hierarchy(tmp_path/'c.csv').leaves==['cat','dog']


def test_the_audit_says_where_targets_come_from(tmp_path):
    (tmp_path/'p.csv').write_text('file,prediction\n/home/cat/new/1.png,dog\n')
    p = read_predictions(tmp_path/'p.csv', Hierarchy.from_paths(['cat','dog']))
    assert p.notes==["there is no column 'target': folders name the classes, as 'cat' for '/home/cat/new/1.png'"]
