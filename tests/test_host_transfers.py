"""How often a round waits for the device: once for a chain, twice for a tree, which is grown on the host."""

import functools

import pytest
import torch
from generation_material import fast, generate, generate_batch, make_drafter, make_target
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_hf import DFlashDraftModel

_READS = {
    torch.ops.aten._local_scalar_dense.default,  # item(), int(), bool() and the like
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


class CountedReads(TorchDispatchMode):
    """Counts operations whose result the host has to know, on any device."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func in _READS
        return func(*args, **(kwargs or {}))


@pytest.fixture
def count_reads(monkeypatch):
    """Counts the reads of a call and returns them with its rounds."""
    tolist = torch.Tensor.tolist

    def count(call):
        reads = CountedReads()

        def counted(tensor):
            reads.num_reads += 1
            return tolist(tensor)

        with monkeypatch.context() as patch, torch.compiler.set_stance("force_eager"), reads:
            patch.setattr(torch.Tensor, "tolist", counted)
            output = call()
        return reads.num_reads, max(map(len, output.accepted_lengths))

    return count


def test_reads_are_counted(count_reads):
    class Output:
        accepted_lengths = [[1]]

    def call():
        tensor = torch.tensor([1, 0])
        assert tensor.tolist() and int(tensor[0]) and bool(tensor[0]) and len(tensor.nonzero()) == 1
        return Output

    assert count_reads(call) == (4, 1)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (generate, {}),
        (generate, {"cache_implementation": "static"}),
        (generate, fast()),
        (generate_batch, {}),
        (generate_batch, fast()),
    ],
    ids=["eager", "static", "fast", "eager batch", "fast batch"],
)
@pytest.mark.parametrize(
    ("options", "reads_a_round"),
    [({"num_assistant_tokens": 7}, 1), ({"num_tree_nodes": 15}, 2), ({"num_tree_nodes": "auto"}, 2)],
    ids=["chain", "tree", "auto"],
)
def test_round_reads_the_device_once_and_a_tree_once_more(count_reads, path, call, options, reads_a_round):
    target = make_target("llama")
    drafter = make_drafter(target, DFlashDraftModel)
    counts = []
    for max_new_tokens in (10, 20, 60):  # the first call checks and compiles
        arguments = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **options, **path}
        counts.append(count_reads(functools.partial(call, target, assistant_model=drafter, **arguments)))
    _, (few_reads, few_rounds), (many_reads, many_rounds) = counts
    assert many_rounds - few_rounds > 20
    # Rows may part in one of the calls only.
    assert many_reads - few_reads <= reads_a_round * (many_rounds - few_rounds) + 2
