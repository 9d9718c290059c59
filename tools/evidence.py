"Run the experiments with pretrained networks on CIFAR-100, in stages; finished runs are kept, so stop and start at will"
import argparse, itertools, json, pandas as pd, torch, torch.nn.functional as F
from pathlib import Path
from functools import partial
from hierproto.recipes import GROUPS, resolve
from hierproto.experiments import prepare, run_sweep
from hierproto.hierarchy import Hierarchy
from hierproto.runs import run_data, run_learner

DECAYS = (.3, 1., 3.)
# one further setting of each method, with two values: six trials for each
KNOBS = dict(cross_entropy=('lr',1e-3,3e-3), learnt=('proto_lr',1.,10.), gp_disto=('lam',1.,10.), soft_labels=('beta',10.,30.),
             hxe=('alpha',.1,.5), emd=('reg',.05,.5), yolo=('lr',1e-3,3e-3), fixed=('lr',3e-3,1e-2), gp_rank=('lam',1.,10.),
             deep_ncm=('lr',1e-3,3e-3), frame=('lr',3e-3,1e-2), hyperspherical=('lr',3e-3,1e-2), hie=('lr',1e-3,3e-3),
             hier_cos=('lr',1e-3,3e-3), haframe=('lr',3e-3,1e-2))
SIZES = {.01: 32, .05: 32, .1: 64, .2: 128, .5: 256} # smaller batches, so that the number of steps stays about the same
LAMBDAS = (.1, .3, 1., 3., 10., 30., 100.)

def trials():
    "Six settings for each method, as triples of method, settings and recipe"
    sets = [(m, {'wd': wd, k: v}) for m,(k,*values) in KNOBS.items() for wd,v in itertools.product(DECAYS, values)]
    return [(m, o, resolve('cifar100', m, 'features_study', **o)) for m,o in sets]

def chosen(out):
    "The settings of each method with the lowest average cost on a held-out tenth of the training set, once all its trials are done"
    ahc = pd.read_csv(Path(out)/'cifar100_features_study.csv').set_index('run_id').ahc
    tried = {m: [(o, r['run_id']) for n,o,r in trials() if n==m] for m in KNOBS}
    return {m: min(ts, key=lambda t: ahc[t[1]])[0] for m,ts in tried.items() if all(i in ahc.index for _,i in ts)}

def runs(method, settings, seeds, **more):
    "The recipes of `method` with `settings`, one per seed"
    return [resolve('cifar100', method, 'features', seed=s, **{**settings, **more}) for s in seeds]

def table(best, seeds): return [r for s in seeds for m in best for r in runs(m, best[m], [s])]

def sizes(best, seeds=range(5)):
    lines = [(m, best[m]) for m in ('cross_entropy','learnt','soft_labels','hxe')]
    lines += [('gp_disto', dict(best['gp_disto'], lam=lam)) for lam in (1.,20.)]
    return [r for f,bs in SIZES.items() for m,o in lines for r in runs(m, o, seeds, fraction=f, bs=bs)]

def ablations(best, seeds=range(5)):
    gp = best['gp_disto']
    lines = [('gp_disto', dict(gp, lam=lam)) for lam in LAMBDAS]
    lines += [(m, gp) for m in ('gp_disto_fixed_scale','gp_disto_squared','gp_disto_huber')] + [('gp_disto', dict(gp, hidden=False))]
    return [r for m,o in lines for r in runs(m, o, seeds)]

def hidden(best, seeds=range(5)): return [r for s in seeds for m in best for r in runs(m, best[m], [s], arch='hidden')]

RATES = (3e-4, 1e-3, 3e-3)

def tuning(best, tier, rates, fraction, seed=0):
    "Recipes for the whole network, as triples of method, rate and recipe; other settings of the methods are those chosen on frozen features"
    own = {m: {k: v for k,v in best[m].items() if k not in ('lr','wd')} for m in GROUPS['finetune']}
    few = dict(bs=32) if fraction<1 else {} # more steps from few pictures
    return [(m, lr, resolve('cifar100', m, tier, seed=seed, fraction=fraction, lr=lr, **few, **own[m])) for m in own for lr in rates]

def finetune(out, best, fraction, seeds):
    "Each method at its best rate on a held-out tenth of the training set, seed by seed"
    ahc = pd.read_csv(Path(out)/'cifar100_finetune_study.csv').set_index('run_id').ahc
    trials = [(ahc[r['run_id']], m, lr) for m,lr,r in tuning(best, 'finetune_study', RATES, .1)]
    rate = {m: min(t for t in trials if t[1]==m)[2] for m in GROUPS['finetune']}
    return [r for s in seeds for m,lr,r in tuning(best, 'finetune', RATES, fraction, s) if lr==rate[m]]

# the senses that the pictures show, where they are not the first
SENSES = dict(aquarium_fish='goldfish.n.01', beaver='beaver.n.07', bowl='bowl.n.03', castle='castle.n.02', cloud='cloud.n.02', dolphin='dolphin.n.02',
              flatfish='flatfish.n.02', forest='forest.n.02', girl='female_child.n.01', lamp='lamp.n.02', leopard='leopard.n.02', lobster='lobster.n.02',
              maple_tree='maple.n.02', mushroom='mushroom.n.03', otter='otter.n.02', plate='plate.n.04', raccoon='raccoon.n.02', ray='ray.n.07',
              seal='seal.n.09', shrew='shrew.n.02', skunk='skunk.n.04', sweet_pepper='sweet_pepper.n.02', table='table.n.02',
              television='television_receiver.n.01', tiger='tiger.n.02', trout='trout.n.02', turtle='turtle.n.02', whale='whale.n.02')

def make_trees(out):
    "Trees that nobody has to know: WordNet's, clustered from class means of features, and from mistakes on the held-out tenth; and a flat one"
    h,folder = Hierarchy.named('cifar100'),Path(out)/'trees'
    dls,_ = run_data(resolve('cifar100', 'cross_entropy', 'features'))
    x,y,vocab = dls.train_ds.x,dls.train_ds.y,list(dls.vocab)
    Hierarchy.from_wordnet(vocab, senses=SENSES, name='wordnet').to_csv(folder/'cifar100_wordnet.csv')
    means = torch.stack([x[y==k,0].float().mean(0) for k in range(len(vocab))])
    r = resolve('cifar100', 'cross_entropy', 'features_study', **chosen(out)['cross_entropy'])
    dls,_ = run_data(r)
    learn = run_learner(r, dls, h)
    with learn.no_bar(), learn.no_logging(): learn.fit(r['epochs'])
    with learn.no_bar(): probs,targ = learn.get_preds()
    # classes that get each other's probability are alike
    confused = torch.stack([probs[targ==k].mean(0) for k in range(len(vocab))]).numpy()
    widths = [len({p[:i] for p in h.nodes[:len(h)]}) for i in range(1, 5)] # as many groups per level as in the expert tree
    for name,v,metric in (('clustered',F.normalize(means).numpy(),'euclidean'), ('confusions',confused**.5,'euclidean')):
        Hierarchy.from_vectors(v, vocab, widths=widths, method='ward', metric=metric, name=name).to_csv(folder/f'cifar100_{name}.csv')
    Hierarchy.from_paths([(o,) for o in vocab], name='flat').to_csv(folder/'cifar100_flat.csv')

TREES = 'shuffled','random','flat','wordnet','clustered','confusions'

def trees(out, best, seeds=range(5)):
    if not (Path(out)/'trees'/'cifar100_confusions.csv').exists(): make_trees(out)
    return [r for m in ('gp_disto','soft_labels') for o in TREES
            for r in runs(m, best[m], seeds, hierarchy=f'{out}/trees/cifar100_{o}.csv')]

STAGES = dict(table=lambda out, best: table(best, range(5)), seeds=lambda out, best: table(best, range(10)), sizes=lambda out, best: sizes(best),
              ablations=lambda out, best: ablations(best), trees=trees, hidden=lambda out, best: hidden(best),
              finetune_study=lambda out, best: [r for *_,r in tuning(best, 'finetune_study', RATES, .1)],
              finetune_tenth=lambda out, best: finetune(out, best, .1, range(5)), finetune=lambda out, best: finetune(out, best, 1., range(3)))

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('stages', nargs='+', help=f"any of study, {', '.join(STAGES)}; the others need what the studies chose")
    p.add_argument('--out', default='results')
    a = p.parse_args()
    prepare()
    for s in a.stages:
        rs = [r for *_,r in trials()] if s=='study' else STAGES[s](a.out, chosen(a.out))
        run_sweep(rs, out=a.out, say=partial(print, flush=True), preds=s in ('finetune_tenth','finetune'))

if __name__=='__main__': main()
