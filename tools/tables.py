"Compare `HierarchicalClassifier` with HiClass and logistic regression on arrays, into results/tables.csv"
import argparse, time, warnings
import numpy as np
from hiclass import LocalClassifierPerParentNode
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedShuffleSplit, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from hierproto.estimator import HierarchicalClassifier
from hierproto.hierarchy import Hierarchy
from hierproto.paper.data.common import take_fraction
from hierproto.files import add_row, commit, finished, versions

warnings.filterwarnings('ignore')
STRENGTHS = (.01, .1, 1., 10.) # of the regularisation: four trials for each model
COLUMNS = 'run_id data model seed setting er ahc levels fit_seconds n_train n_test commit versions'.split()

def digits():
    X,y = load_digits(return_X_y=True)
    return X, y.astype(str), Hierarchy.named('mnist_visual')

def pictures():
    "Frozen features of a tenth of CIFAR-100"
    from hierproto.paper.recipes import resolve
    from hierproto.paper.runs import run_data
    dls,_ = run_data(resolve('cifar100', 'cross_entropy', 'features'))
    x,y,vocab = dls.train_ds.x,dls.train_ds.y,list(dls.vocab)
    i = take_fraction(y, .1)
    return x[i,0].float().numpy(), np.array(vocab)[y[i]], Hierarchy.named('cifar100').align(vocab)

class HiClass(ClassifierMixin, BaseEstimator):
    "HiClass with one logistic regression per inner node, on the paths of the classes"
    def __init__(self, h, C=1.): self.h,self.C = h,C
    def fit(self, X, y):
        paths = {p[-1]: p for p in self.h.nodes[:len(self.h)]}
        self.classes_ = np.unique(y)
        self.model_ = LocalClassifierPerParentNode(LogisticRegression(C=self.C, max_iter=300))
        self.model_.fit(X, [list(paths[o]) for o in y])
        return self
    def predict(self, X): return np.array([[o for o in r if o!=''][-1] for r in self.model_.predict(X)])

METHODS = 'cross_entropy','soft_labels','gp_disto'

def models(h, strength):
    "All models by name, with one strength of regularisation"
    net = lambda m: HierarchicalClassifier(h, m, hidden=128, epochs=20, wd=strength/10, random_state=0)
    return dict(logistic=LogisticRegression(C=strength, max_iter=300), hiclass=HiClass(h, strength),
                **{m: net(m) for m in METHODS})

def measure(h, answers, y):
    index = {o: k for k,o in enumerate(h.leaves)}
    a,b = [np.array([index[o] for o in v]) for v in (answers, y)]
    levels = [float((h.ancestors(l).numpy()[a]==h.ancestors(l).numpy()[b]).mean()) for l in range(1, h.depth+1)]
    return dict(er=(a!=b).mean(), ahc=h.costs().numpy()[a,b].mean(), levels=levels)

def one(name, X, y, h, model, seed, out):
    (i,j), = StratifiedShuffleSplit(1, test_size=.25, random_state=seed).split(X, y)
    fit,valid = train_test_split(i, test_size=.2, random_state=seed, stratify=y[i])
    def fitted(strength, rows): return make_pipeline(StandardScaler(), models(h, strength)[model]).fit(X[rows], y[rows])
    def cost(strength): return measure(h, fitted(strength, fit).predict(X[valid]), y[valid])['ahc']
    best = min(STRENGTHS, key=cost)
    start = time.process_time()
    final = fitted(best, i)
    seconds = round(time.process_time()-start, 2)
    row = dict(run_id=f'{name}_{model}_{seed}', data=name, model=model, seed=seed, setting=best, fit_seconds=seconds,
               n_train=len(i), n_test=len(j), commit=commit(), versions=versions(),
               **measure(h, final.predict(X[j]), y[j]))
    add_row(out, row, COLUMNS)
    print(row, flush=True)

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--data', default='digits')
    p.add_argument('--seeds', type=int, default=5)
    p.add_argument('--out', default='results/tables.csv')
    a = p.parse_args()
    X,y,h = dict(digits=digits, pictures=pictures)[a.data]()
    done = finished(a.out)
    for seed in range(a.seeds):
        for m in models(h, 1.):
            if f'{a.data}_{m}_{seed}' not in done: one(a.data, X, y, h, m, seed, a.out)

if __name__=='__main__': main()
