"Run the experiments with pretrained networks, in stages; finished runs are kept, so stop and start at will"
import argparse, itertools, pandas as pd, torch, torch.nn.functional as F
from functools import partial
from pathlib import Path
from hierproto.experiments import prepare, run_sweep
from hierproto.hierarchy import Hierarchy
from hierproto.recipes import GROUPS, resolve
from hierproto.rows import read_rows
from hierproto.runs import results_file, run_data, run_learner

DECAYS = (.3, 1., 3.)
# one further setting of each method, with two values: six trials for each
KNOBS = dict(cross_entropy=('lr',1e-3,3e-3), learnt=('proto_lr',1.,10.), gp_disto=('lam',1.,10.),
             soft_labels=('beta',10.,30.), hxe=('alpha',.1,.5), emd=('reg',.05,.5), yolo=('lr',1e-3,3e-3),
             fixed=('lr',3e-3,1e-2), gp_rank=('lam',1.,10.), deep_ncm=('lr',1e-3,3e-3), frame=('lr',3e-3,1e-2),
             hyperspherical=('lr',3e-3,1e-2), hie=('lr',1e-3,3e-3), hier_cos=('lr',1e-3,3e-3), haframe=('lr',3e-3,1e-2))
RATES = (3e-4, 1e-3, 3e-3) # of fine-tuning
MAP_RATES = (1e-3, 3e-3, 1e-2) # of NYUDv2
# smaller with less data, so that the number of steps stays about the same
BATCHES = {.01: 32, .05: 32, .1: 64, .2: 128, .5: 256}
LAMBDAS = (.1, .3, 1., 3., 10., 30., 100.)
TREES = 'shuffled','random','flat','wordnet','clustered','confusions'

def trials(**more):
    "Six settings for each method, as triples of method, settings and recipe"
    sets = [(m, {'wd': wd, k: v}) for m,(k,*values) in KNOBS.items() for wd,v in itertools.product(DECAYS, values)]
    return [(m, o, resolve('cifar100', m, 'features_study', **o, **more)) for m,o in sets]

def chosen(out, **more):
    "The settings of each method with the lowest average cost on a held-out tenth, once all its trials are done"
    ahc = pd.read_csv(Path(out)/'cifar100_features_study.csv').set_index('run_id').ahc
    tried = {m: [(o, r['run_id']) for n,o,r in trials(**more) if n==m] for m in KNOBS}
    return {m: min(ts, key=lambda t: ahc[t[1]])[0] for m,ts in tried.items() if all(i in ahc.index for _,i in ts)}

def runs(method, settings, seeds, **more):
    "The recipes of `method` with `settings`, one per seed"
    return [resolve('cifar100', method, 'features', seed=s, **{**settings, **more}) for s in seeds]

def read(recipes, out):
    "The finished rows of `recipes`, which have one results file"
    df = read_rows(results_file(recipes[0], out))
    return df[df.run_id.isin({r['run_id'] for r in recipes})].sort_values('seed') if len(df) else df

def table(best, seeds=range(10)): return {m: runs(m, best[m], seeds) for m in best}

def hidden(out, seeds=range(10)):
    "Recipes by method, with a hidden layer and the settings chosen with it"
    return {m: runs(m, o, seeds, arch='hidden') for m,o in chosen(out, arch='hidden').items()}

def part(fraction):
    "Settings of runs on a `fraction` of the training set"
    return dict(fraction=fraction, bs=BATCHES[fraction]) if fraction<1 else {}

def sizes(best, seeds=range(5)):
    "Recipes by method and part of the training set"
    lines = {m: (m, best[m]) for m in ('cross_entropy','learnt','soft_labels','hxe')}
    lines |= {f'gp_disto:lam={lam:g}': ('gp_disto', dict(best['gp_disto'], lam=lam)) for lam in (1.,20.)}
    return {(k,f): runs(m, o, seeds, **part(f)) for f in (*BATCHES, 1.) for k,(m,o) in lines.items()}

def ablations(best, seeds=range(5)):
    "Recipes by variant of guided prototypes"
    gp = best['gp_disto']
    lines = {f'gp_disto:lam={lam:g}': ('gp_disto', dict(gp, lam=lam)) for lam in LAMBDAS}
    lines |= {m: (m, gp) for m in ('gp_disto_fixed_scale','gp_disto_squared','gp_disto_huber')}
    lines |= {'gp_disto:hidden=False': ('gp_disto', dict(gp, hidden=False))}
    return {k: runs(m, o, seeds) for k,(m,o) in lines.items()}

def trees(best, out, fraction=1., seeds=range(5)):
    "Recipes by method and tree"
    if not (Path(out)/'trees'/'cifar100_confusions.csv').exists(): make_trees(out)
    return {(m,o): runs(m, best[m], seeds, hierarchy=f'{out}/trees/cifar100_{o}.csv', **part(fraction))
            for m in ('gp_disto','soft_labels') for o in TREES}

# the senses that the pictures show, where they are not the first
SENSES = dict(aquarium_fish='goldfish.n.01', beaver='beaver.n.07', bowl='bowl.n.03', castle='castle.n.02',
              cloud='cloud.n.02', dolphin='dolphin.n.02', flatfish='flatfish.n.02', forest='forest.n.02',
              girl='female_child.n.01', lamp='lamp.n.02', leopard='leopard.n.02', lobster='lobster.n.02',
              maple_tree='maple.n.02', mushroom='mushroom.n.03', otter='otter.n.02', plate='plate.n.04',
              raccoon='raccoon.n.02', ray='ray.n.07', seal='seal.n.09', shrew='shrew.n.02', skunk='skunk.n.04',
              sweet_pepper='sweet_pepper.n.02', table='table.n.02', television='television_receiver.n.01',
              tiger='tiger.n.02', trout='trout.n.02', turtle='turtle.n.02', whale='whale.n.02')

def make_trees(out):
    "Write trees that need no expert: WordNet's, from class means of features, from mistakes on a held-out tenth, flat"
    h,folder = Hierarchy.named('cifar100'),Path(out)/'trees'
    dls,_ = run_data(resolve('cifar100', 'cross_entropy', 'features'))
    x,y,vocab = dls.train_ds.x,dls.train_ds.y,list(dls.vocab)
    means = torch.stack([x[y==k,0].float().mean(0) for k in range(len(vocab))])
    r = resolve('cifar100', 'cross_entropy', 'features_study', **chosen(out)['cross_entropy'])
    dls,_ = run_data(r)
    learn = run_learner(r, dls, h)
    with learn.no_bar(), learn.no_logging(): learn.fit(r['epochs'])
    with learn.no_bar(): probs,targ = learn.get_preds()
    # classes that get each other's probability are alike
    confused = torch.stack([probs[targ==k].mean(0) for k in range(len(vocab))]).numpy()
    # as many groups per level as in the expert tree
    for name,v in (('clustered',F.normalize(means).numpy()), ('confusions',confused**.5)):
        tree = Hierarchy.from_vectors(v, vocab, widths=h.widths[:-1], method='ward', metric='euclidean')
        tree.to_csv(folder/f'cifar100_{name}.csv')
    Hierarchy.from_wordnet(vocab, senses=SENSES).to_csv(folder/'cifar100_wordnet.csv')
    Hierarchy.from_paths([(o,) for o in vocab]).to_csv(folder/'cifar100_flat.csv')

def tuning(best, tier, fraction, seed=0):
    "Recipes for the whole network by method and rate; other settings are those chosen on frozen features"
    own = {m: {k: v for k,v in best[m].items() if k not in ('lr','wd')} for m in GROUPS['finetune']}
    few = dict(bs=32) if fraction<1 else {} # more steps from few pictures
    return {(m,lr): resolve('cifar100', m, tier, seed=seed, fraction=fraction, lr=lr, **few, **own[m])
            for m in own for lr in RATES}

def best_rates(best, out):
    "The rate of fine-tuning by method, chosen on a held-out tenth of the training set"
    ahc = pd.read_csv(Path(out)/'cifar100_finetune_study.csv').set_index('run_id').ahc
    cost = {k: ahc[r['run_id']] for k,r in tuning(best, 'finetune_study', .1).items()}
    return {m: min(RATES, key=lambda lr: cost[m,lr]) for m in GROUPS['finetune']}

def finetune(best, out, fraction, seeds):
    "Recipes for the whole network by method"
    return {m: [tuning(best, 'finetune', fraction, s)[m,lr] for s in seeds] for m,lr in best_rates(best, out).items()}

def map_trials():
    "Recipes on NYUDv2 by method and rate"
    methods = 'cross_entropy','soft_labels','yolo','learnt','gp_disto'
    return {(m,lr): resolve('nyudv2', m, 'features_study', lr=lr) for m in methods for lr in MAP_RATES}

def maps(out, seeds=range(5)):
    "Recipes on NYUDv2 by method, with the rate of the lowest average cost on held-out frames"
    ahc = pd.read_csv(Path(out)/'nyudv2_features_study.csv').set_index('run_id').ahc
    cost = {k: ahc[r['run_id']] for k,r in map_trials().items()}
    best = {m: min(MAP_RATES, key=lambda lr: cost[m,lr]) for m,_ in cost}
    return {m: [resolve('nyudv2', m, 'features', seed=s, lr=lr) for s in seeds] for m,lr in best.items()}

def in_turn(lines): return [r for rs in zip(*lines.values()) for r in rs] # seed by seed

STAGES = dict(study=lambda best, out: [r for *_,r in trials()],
              table=lambda best, out: in_turn(table(best)),
              hidden_study=lambda best, out: [r for *_,r in trials(arch='hidden')],
              hidden=lambda best, out: in_turn(hidden(out)),
              sizes=lambda best, out: sum(sizes(best).values(), []),
              ablations=lambda best, out: in_turn(ablations(best)),
              trees=lambda best, out: in_turn(trees(best, out)) + in_turn(trees(best, out, .05)),
              finetune_study=lambda best, out: list(tuning(best, 'finetune_study', .1).values()),
              finetune_tenth=lambda best, out: in_turn(finetune(best, out, .1, range(5))),
              finetune=lambda best, out: in_turn(finetune(best, out, 1., range(3))),
              maps_study=lambda best, out: list(map_trials().values()),
              maps=lambda best, out: in_turn(maps(out)))

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('stages', nargs='+', choices=STAGES,
                   help='the stages ending in study come first: the others need what they choose')
    p.add_argument('--out', default='results')
    a = p.parse_args()
    prepare()
    for s in a.stages:
        best = {} if s in ('study','hidden_study','hidden') or s.startswith('maps') else chosen(a.out)
        run_sweep(STAGES[s](best, a.out), out=a.out, say=partial(print, flush=True),
                  preds=s in ('finetune_tenth','finetune','maps'))

if __name__=='__main__': main()
