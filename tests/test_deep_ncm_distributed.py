("Two gloo processes count the class means of Deep-NCM together: "
 "the prototypes are those of one process that saw everything.")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hierproto.baselines.deep_ncm import NCMHead

def data():
    g = torch.Generator().manual_seed(0)
    return torch.randn(60, 4, generator=g), torch.randint(5, (60,), generator=g)

def worker(rank, store, out):
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    z, y = data()
    head = NCMHead(4, 5)
    # unequal shares: a mean of the processes' means would differ
    part = slice(0, 10) if rank == 0 else slice(10, 60)
    for a, b in zip(z[part].chunk(2), y[part].chunk(2)): head.update(a, b)
    torch.save(head.state_dict(), f'{out}{rank}')
    dist.destroy_process_group()

def test_two_processes_have_the_means_of_all(tmp_path):
    mp.spawn(worker, (tmp_path/'store', str(tmp_path/'out')), nprocs=2)
    z, y = data()
    alone = NCMHead(4, 5)
    alone.update(z, y)
    for rank in range(2):
        there = torch.load(tmp_path/f'out{rank}', weights_only=True)
        assert torch.equal(there['counts'], alone.counts)
        assert torch.allclose(there['protos'], alone.protos, atol=1e-6)
