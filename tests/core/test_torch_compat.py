"""What kalign asks of torch's internals: like tensors, new tensors, marks of writing, and tensors without bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kalign_core.hal import torch_compat
from tests.core.scripted import normals

GUARDS = "torch._C._dynamo.guards"


@pytest.fixture(params=["torch's", "ours"])
def same_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The check of tensors, as torch has it and as kalign has it where torch has none."""
    if request.param == "ours":
        monkeypatch.setattr(torch_compat, "_guards_work", lambda: False)
    return torch_compat.same_kind


@pytest.fixture
def asked_again() -> Iterator[None]:
    """What torch can do is found out in this test and once more after it."""
    torch_compat._guards_work.cache_clear()
    yield
    torch_compat._guards_work.cache_clear()


class Subclass(torch.Tensor):
    """A class of its own."""


BASE = torch.zeros(4, 8)
STRANGERS = {
    "fewer rows": torch.zeros(2, 8),
    "another rank": torch.zeros(4, 8, 1),
    "strides": torch.zeros(8, 4).t(),
    "padding": torch.zeros(4, 16)[:, :8],
    "dtype": torch.zeros(4, 8, dtype=torch.float64),
    "device": torch.zeros(4, 8, device="meta"),
    "requires_grad": torch.zeros(4, 8, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False),
    "subclass": torch.zeros(4, 8).as_subclass(Subclass),
    "negative view": torch._neg_view(torch.zeros(4, 8)),
    "none": None,
    "number": 1.0,
    "array": torch.zeros(4, 8).numpy(),
}
MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "no autograd keys": torch._C._AutoDispatchBelowAutograd,
}


# --- like tensors -------------------------------------------------------------------------------------------------


def test_other_contents_and_addresses_are_alike(same_kind: Any) -> None:
    """Tensors that differ in nothing but where and what they are pass."""
    check = same_kind((BASE, BASE[:2]))
    assert check(torch.ones(4, 8), torch.ones(4, 8)[:2])
    assert check(torch.ones(8, 8)[4:], torch.ones(4, 8)[2:])


@pytest.mark.parametrize("name", STRANGERS)
def test_whatever_a_launch_may_depend_on_is_told_apart(same_kind: Any, name: str) -> None:
    """A tensor of another kind does not pass in any place, nor the first kind for it."""
    stranger = STRANGERS[name]
    check = same_kind((BASE, torch.ones(4, 8)))
    assert not check(stranger, torch.ones(4, 8))
    assert not check(BASE, stranger)
    if isinstance(stranger, torch.Tensor):
        assert not same_kind((stranger,))(BASE)
        assert same_kind((stranger,))(stranger)


def test_two_devices_of_one_kind_are_told_apart(same_kind: Any) -> None:
    """The second card's tensors are not the first one's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        first, second = (torch.empty(4, 8, device=f"cuda:{index}") for index in range(2))
    check = same_kind((first,))
    assert (check(first), check(second)) == (True, False)


def test_requires_grad_counts_without_gradients_too(same_kind: Any) -> None:
    """Under ``no_grad`` a tensor that requires gradients is still another kind, in either direction."""
    needs = torch.zeros(4, 8, requires_grad=True)
    with torch.no_grad():
        plain, needing = same_kind((BASE,)), same_kind((needs,))
        assert (plain(needs), needing(BASE), needing(needs)) == (False, False, True)
    assert (plain(needs), needing(BASE), needing(needs)) == (False, False, True)


@pytest.mark.parametrize("name", MODES)
def test_what_torch_does_on_the_way_is_told_apart(same_kind: Any, name: str) -> None:
    """The same tensor under another mode is another kind, in either direction."""
    outside = same_kind((BASE,))
    with MODES[name]():
        inside = same_kind((BASE,))
        assert (outside(BASE), inside(BASE)) == (False, True)
    assert (outside(BASE), inside(BASE)) == (True, False)


def test_tensors_of_inference_mode_are_told_apart(same_kind: Any) -> None:
    """A tensor made in inference mode is another kind than one made outside."""
    with torch.inference_mode():
        made = torch.zeros(4, 8)
        assert not same_kind((BASE,))(made)
        assert same_kind((made,))(torch.zeros(4, 8))


def test_batched_tensors_are_told_apart(same_kind: Any) -> None:
    """A tensor inside a functional transform is not the one it looks like."""
    check, answers = same_kind((BASE,)), []
    torch.func.vmap(lambda x: answers.append(check(x)) or x)(torch.zeros(3, 4, 8))
    assert answers == [False]


def test_a_tensor_passed_twice_passes_twice(same_kind: Any) -> None:
    """Where two places had one tensor, calls with one tensor in both pass."""
    check = same_kind((BASE, BASE, torch.ones(2, 8)))
    other = torch.ones(4, 8)
    assert check(other, other, torch.zeros(2, 8))
    assert not check(other, other, other)
    assert not check(other, other.double(), torch.zeros(2, 8))


# --- whether torch's check can be used ----------------------------------------------------------------------------


def test_torch_s_check_works_here(asked_again: None) -> None:
    """On the torch that is tested with, its own check is used."""
    assert torch_compat._guards_work()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, *MODES.values()])
def test_it_does_not_matter_where_it_is_asked_first(asked_again: None, mode: Callable[[], Any]) -> None:
    """A process that lives under a mode finds out the same, at no price for its calls."""
    with mode():
        assert torch_compat._guards_work()


class Liar:
    """A check of tensors that does not look at ``ignores`` of them."""

    def __init__(self, ignores: str) -> None:
        self.ignores = ignores

    def __call__(self, *tensors: torch.Tensor, **sizes: Any) -> Any:
        return SimpleNamespace(check=self._checked(tensors))

    def _checked(self, tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
        def describe(t: torch.Tensor) -> dict[str, Any]:
            rest = str(torch._C._dispatch_keys(t).raw_repr()), str(torch._C._dispatch_tls_local_exclude_set())
            return {
                "class": t.__class__, "shape": t.shape, "stride": t.stride(), "dtype": t.dtype, "device": t.device,
                "grad": t.requires_grad, "keys": rest,
            }  # fmt: skip

        expected = [describe(tensor) for tensor in tensors]

        def check(*others: Any) -> bool:
            if not all(isinstance(other, torch.Tensor) for other in others):
                return self.ignores == "kind"
            return all(
                self.ignores == "everything" or all(a[k] == b[k] for k in a if k != self.ignores)
                for a, b in zip(map(describe, others), expected, strict=True)
            )

        return check


@pytest.mark.parametrize("ignores", ["class", "shape", "stride", "dtype", "grad", "keys", "kind", "everything"])
def test_a_check_that_overlooks_something_is_not_used(
    asked_again: None, monkeypatch: pytest.MonkeyPatch, ignores: str
) -> None:
    """Were torch's check to stop looking at one of these, kalign's own would be taken."""
    monkeypatch.setattr(f"{GUARDS}.TensorGuards", Liar("nothing"))
    assert torch_compat._guards_work()
    torch_compat._guards_work.cache_clear()
    monkeypatch.setattr(f"{GUARDS}.TensorGuards", Liar(ignores))
    assert not torch_compat._guards_work()


def refuses_everything(*tensors: Any, **sizes: Any) -> Any:
    """A check that nothing passes."""
    return SimpleNamespace(check=lambda *others: False)


def takes_no_sizes(*tensors: Any) -> Any:
    """A check of another version."""


@pytest.mark.parametrize("found", [refuses_everything, takes_no_sizes, None])
def test_a_check_that_cannot_be_used_is_not(asked_again: None, monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """A check that passes nothing, takes other arguments or is not there costs no call its answer."""
    if found is None:
        monkeypatch.delattr(f"{GUARDS}.TensorGuards")
    else:
        monkeypatch.setattr(f"{GUARDS}.TensorGuards", found)
    assert not torch_compat._guards_work()
    assert torch_compat.same_kind((BASE,))(torch.ones(4, 8))


# --- new tensors and writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_new_tensors_are_ordinary_ones(monkeypatch: pytest.MonkeyPatch, quick: bool, mode: Callable[[], Any]) -> None:
    """A tensor that is made quickly is what ``torch.empty`` makes in the mode in force."""
    like = torch.zeros(3, 5, dtype=torch.bfloat16)
    if not quick:
        monkeypatch.setattr(torch_compat.sys, "modules", {})
    new = torch_compat.allocator(like)
    monkeypatch.undo()
    with mode():
        made, plain = new(), torch.empty(3, 5, dtype=torch.bfloat16)
        assert new().data_ptr() != made.data_ptr()
    for ask in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(made, ask) == getattr(plain, ask)
    assert (made.stride(), made.is_inference()) == (plain.stride(), plain.is_inference())


def test_writes_are_counted() -> None:
    """A mark is one more version of each tensor."""
    tensors = (torch.zeros(2), torch.zeros(2))
    torch_compat.mark_written(tensors)
    assert [tensor._version for tensor in tensors] == [1, 1]


@pytest.mark.parametrize("found", [None, lambda tensors: None, lambda one, two: None])
def test_a_mark_that_does_not_count_is_not_used(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """Were torch's inner function gone, without effect or another one, its public one would be taken."""
    if found is None:
        monkeypatch.delattr(torch._C, "_increment_version")
    else:
        monkeypatch.setattr(torch._C, "_increment_version", found)
    assert torch_compat._find_increment() is torch.autograd.graph.increment_version


def test_the_quick_mark_is_found_under_inference_mode() -> None:
    """A process that starts in inference mode marks as quickly as any."""
    with torch.inference_mode():
        assert torch_compat._find_increment() is torch._C._increment_version


def test_writes_that_torch_saw() -> None:
    """Operations of torch count; tensors of inference mode have no count."""
    with torch.inference_mode():
        untracked = torch.zeros(2).add_(1)
    counts = [torch_compat.torch_writes(tensor) for tensor in (torch.empty(2), torch.empty(2).add_(1), untracked)]
    assert counts == [0, 1, 0]


@pytest.mark.parametrize(("device", "now", "says"), [("cuda:1", 1, True), ("cuda:1", 0, False), ("cpu", 1, True)])
def test_the_current_device(monkeypatch: pytest.MonkeyPatch, device: str, now: int, says: bool) -> None:
    """A device of several is the one that memory comes from only while it is current; the host always is."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now, raising=False)
    assert torch_compat.is_current(torch.device(device))() is says


# --- what a kernel cannot read ------------------------------------------------------------------------------------


def test_ordinary_tensors_can_be_read() -> None:
    """Views, empty tensors, parameters and tensors that belong to another device's refusal are left alone."""
    ordinary = (BASE, BASE.t()[::2], torch.empty(0, 8), torch.nn.Parameter(BASE), BASE.to("meta"))
    assert [torch_compat.unreadable(tensor) for tensor in ordinary] == [None] * 5


def wrapping() -> torch.Tensor:
    """A tensor that stands for two others."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(BASE, BASE)  # type: ignore[no-any-return]  # torch's, untyped


def fake() -> torch.Tensor:
    """A tensor without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(BASE)


@pytest.mark.parametrize(
    ("make", "what", "instead"),
    [
        (lambda: BASE.to_sparse(), "of layout torch.sparse_coo", "to_dense()"),
        (lambda: BASE.to_mkldnn(), "of layout torch._mkldnn", "to_dense()"),
        (lambda: torch._neg_view(BASE), "a negative or conjugate view", "resolve_neg()"),
        (lambda: BASE.to(torch.complex64).conj(), "a negative or conjugate view", "resolve_conj()"),
        (lambda: torch._efficientzerotensor(4, 8), "a Tensor without memory", "stands for"),
        (wrapping, "a TwoTensor without memory", "stands for"),
        (fake, "a fake tensor", "torch.compile"),
    ],
)
def test_what_cannot_be_read_is_named(make: Callable[[], torch.Tensor], what: str, instead: str) -> None:
    """Each kind of tensor without bytes of its own says what it is and what to call instead."""
    found = torch_compat.unreadable(make())
    assert found is not None
    assert found[0].startswith(what)
    assert instead in found[1]


def test_traces_are_named() -> None:
    """A tensor of a graph that is being recorded is no tensor to launch on: the launch would not be recorded."""
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[Any] = []
    make_fx(lambda x: found.append(torch_compat.unreadable(x)) or x + 1)(normals(2))
    assert found == [("being traced", "torch.compile or torch.export, for which operators are opaque")]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use of what it warns of
def test_tangents_are_named() -> None:
    """A tensor is refused for a tangent that it carries, not for the block it is in."""
    assert not torch_compat.forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert torch_compat.forward_mode()
        assert torch_compat.unreadable(BASE) is None
        found = torch_compat.unreadable(torch.autograd.forward_ad.make_dual(BASE, BASE))
    assert found is not None
    assert found[0].startswith("a dual tensor")
