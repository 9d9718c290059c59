"What the notebook cannot hold: the real compiler, and the full size of iNaturalist-19 against the broadcast"
import shutil, time
import pytest, torch
from hierproto.distortion import disto_loss, pairwise


@pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++') or shutil.which('cl')), reason='torch.compile needs a C++ compiler')
def test_compiled_distances_and_gradients():
    torch.manual_seed(0)
    x, y = torch.randn(12, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    def f(x, y): return pairwise(x, y).logsumexp(1).sum() + pairwise(y).sum()
    plain, fast = f(x, y), torch.compile(f, fullgraph=True)(x, y)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-4)
    for a, b in zip(torch.autograd.grad(fast, (x, y)), torch.autograd.grad(plain, (x, y)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def available_bytes():
    try: return next(int(l.split()[1])*1024 for l in open('/proc/meminfo') if l.startswith('MemAvailable'))
    except (OSError, StopIteration): return 0


@pytest.fixture
def one_thread():
    "One thread and its own clock, so that other processes on the machine do not count"
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.mark.skipif(available_bytes() < 9e9, reason='the broadcast of 1,010 x 1,010 x 512 takes 9 GB of memory')
def test_a_hundred_times_faster_than_the_broadcast(one_thread):
    K, m = 1010, 512
    torch.manual_seed(0)
    protos, D = torch.randn(K, m, requires_grad=True), torch.rand(K, K) + 1
    D.fill_diagonal_(0)
    off = ~torch.eye(K, dtype=torch.bool)
    def broadcast(protos, D):
        a = (protos[:, None] - protos).norm(dim=-1)[off]/D[off]
        return (a*(a.sum()/a.square().sum()) - 1).square().mean()
    def run(f):
        protos.grad, t = None, time.process_time()
        loss = f(protos, D)
        loss.backward()
        return time.process_time() - t, loss.item(), protos.grad
    fast = min(run(disto_loss)[0] for _ in range(10))
    _, value, grad = run(disto_loss)
    slow, oracle, oracle_grad = run(broadcast)
    assert abs(value - oracle) < 1e-5 and torch.allclose(grad, oracle_grad, rtol=1e-3, atol=1e-7)
    assert slow > 100*fast, f'{slow/fast:.0f} times faster'
