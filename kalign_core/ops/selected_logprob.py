"""``selected_logprob(logits, ids)``: log softmax at one column per row; contract in ``kernels/selected_logprob.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.errors import BadArgument
from kalign_core.kernels.row_parts import LOG2_E, row_parts_kernel
from kalign_core.kernels.selected_logprob import selected_logprob_backward_kernel, selected_logprob_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, check_dtype, check_flag, random_tensor, rows_of, tensors_only
from kalign_core.ops.ids import check_ids, watch_range
from kalign_core.ops.noting import allocate, exact, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.ops.softmax import check_temperature, row_parts
from kalign_core.problems import one_device

IGNORE_INDEX = -100


class SelectedLogprob(Operator):
    """``selected_logprob(logits, ids, temperature=1.0, ignore_index=-100, entropy=False, lse=False)``.

    logits: ``(... V)``, ids: ``(...)`` int64 or int32 -> logp: ``(...)`` float32, ``z[id] - log(sum(exp(z)))`` with
    ``z = logits / temperature``. With ``entropy`` and ``lse`` a tuple: logp, then the row's entropy in nats, then
    ``log(sum(exp(z)))``, each ``(...)`` float32 and differentiable. bfloat16, float16, float32; any row stride; rows of
    any length (tried up to 262,144).

    Rows whose id is ``ignore_index`` are not read: exactly 0 in every result and gradient, whatever they hold. An id
    that is neither a column nor ``ignore_index`` gives a NaN logp and a row of NaN gradients. A row with NaN or +inf
    gives NaN; -inf elements weigh nothing; a row's largest logit has to be within 7e8 times the temperature. Raises
    ``BadArgument`` for shapes, dtypes and a temperature that is not positive, ``MixedDevices``.
    """

    name: ClassVar[str] = "selected_logprob"
    kernels = (row_parts_kernel, selected_logprob_kernel, selected_logprob_backward_kernel)
    dims = ("T", "V")
    shapes = ({"T": 4096, "V": 151936}, {"T": 64, "V": 151936})
    small_shapes = ({"T": 3, "V": 40},)

    def __call__(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        temperature: float = 1.0,
        ignore_index: int = IGNORE_INDEX,
        entropy: bool = False,
        lse: bool = False,
    ) -> Any:
        options = Options(temperature, ignore_index, entropy, lse)
        if is_dynamo_compiling() or is_exporting():
            return options.wanted(_opaque(logits, ids, *options))
        try:
            if logits.requires_grad and torch.is_grad_enabled():
                results = _SelectedLogprob.apply(logits, ids, options)  # type: ignore[no-untyped-call]  # torch's apply
            else:
                results = forward(logits, ids, options)
            watch_range("selected_logprob", ids, logits.shape[-1], ignore_index)
            return options.wanted(results)
        except (AttributeError, RuntimeError):
            tensors_only("selected_logprob", logits=logits, ids=ids)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        logits = random_tensor((sizes["T"], sizes["V"]), dtype, seed, device).requires_grad_()
        generator = torch.Generator(device).manual_seed(seed + 1)
        return logits, torch.randint(sizes["V"], (sizes["T"],), generator=generator, device=device)

    def forms(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
        """The logarithm alone, and everything that a call can give."""
        logits, ids = self.inputs(sizes, dtype, seed, device)
        yield logits, ids
        yield logits, ids, 1.0, IGNORE_INDEX, True, True

    def oracle(self, *args: Any) -> torch.Tensor:
        logits, ids = args[:2]
        temperature = args[2] if len(args) > 2 else 1.0
        ignore_index = args[3] if len(args) > 3 else IGNORE_INDEX
        ignored = ids == ignore_index
        z = torch.log_softmax(logits.double() / temperature, -1)
        chosen = z.gather(-1, ids.masked_fill(ignored, 0).long().unsqueeze(-1)).squeeze(-1)
        return chosen.masked_fill(ignored, 0.0)


class Options(NamedTuple):
    """What a call is computed with, and which results beside the logarithm it wants."""

    temperature: float
    ignore_index: int
    entropy: bool = False
    lse: bool = False

    def wanted(self, results: Sequence[Any]) -> Any:
        """What the caller sees of ``Results``: one tensor, or a tuple where more was asked for."""
        asked = (True, self.entropy, self.lse)
        seen = tuple(result for result, is_asked in zip(results[:3], asked, strict=True) if is_asked)
        return seen if len(seen) > 1 else seen[0]


class Results(NamedTuple):
    """logp, entropy and lse ``(...)``, None where not wanted, and the rows' t and s of the contract; float32."""

    logp: torch.Tensor
    entropy: torch.Tensor | None
    lse: torch.Tensor | None
    row_top: torch.Tensor
    row_sum: torch.Tensor


def forward(logits: torch.Tensor, ids: torch.Tensor, options: Options) -> Results:
    """The operator without gradients, with what its backward pass needs."""
    made = iter(_FORWARD((logits, ids), tuple(map(exact, options)), (logits, ids, *options)))
    wanted = (True, options.entropy, options.lse, True, True)
    return Results(*(next(made) if is_wanted else None for is_wanted in wanted))  # type: ignore[arg-type]  # in order


def backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    known: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    upstream: Sequence[torch.Tensor | None],
    options: Options,
) -> torch.Tensor:
    """Gradient of the logits for upstream gradients of logp, entropy and lse; None counts as 0.

    ``known`` are entropy, row_top and row_sum of the forward pass.
    """
    there = tuple(gradient is not None for gradient in upstream)
    entropy, *rows = known
    given = (logits, ids, *rows, *(t for t in (entropy if there[1] else None, *upstream) if t is not None))
    return _BACKWARD(given, (options, there))


def _forward(logits: torch.Tensor, ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    options = Options(*rest)
    _check(logits, ids, options)
    rows, chosen = rows_of("selected_logprob", "logits", logits), ids.reshape(-1).contiguous()
    tokens, width = rows.shape
    logp, entropy, lse = (
        allocate(ids.shape, torch.float32, logits.device) if wanted else None
        for wanted in (True, options.entropy, options.lse)
    )
    row_top, row_sum = (allocate((tokens,), torch.float32, logits.device) for _ in range(2))
    if tokens:
        parts = row_parts(rows, chosen, options.ignore_index, options.temperature, dots=options.entropy)
        per_row = (None if result is None else result.view(-1) for result in (logp, entropy, lse))
        launch(
            selected_logprob_kernel, rows, chosen, *parts, *per_row, row_top, row_sum,
            tokens, width, rows.stride(0), parts[0].stride(0), LOG2_E / options.temperature, options.ignore_index,
        )  # fmt: skip
    return tuple(result for result in (logp, entropy, lse, row_top, row_sum) if result is not None)


def _backward(logits: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    row_top, row_sum, *present, options, there = rest
    d_logits = allocate(logits.shape, logits.dtype, logits.device)
    if not d_logits.numel():
        return d_logits
    rows, o = (rows_of("selected_logprob", "gradient", t) for t in (logits, d_logits))
    per_row = iter(tensor.reshape(-1).contiguous() for tensor in present)
    entropy = next(per_row) if there[1] else None
    gradients = [next(per_row) if is_there else None for is_there in there]
    launch(
        selected_logprob_backward_kernel, rows, ids.reshape(-1).contiguous(), row_top, row_sum, entropy, *gradients, o,
        *rows.shape, rows.stride(0), o.stride(0),
        LOG2_E / options.temperature, 1.0 / options.temperature, options.ignore_index,
    )  # fmt: skip
    return d_logits


_FORWARD = Form("selected_logprob", _forward)
_BACKWARD = Form("selected_logprob backward", _backward)


def _check(logits: torch.Tensor, ids: torch.Tensor, options: Options) -> None:
    one_device("selected_logprob", {"logits": logits, "ids": ids})
    check_dtype("selected_logprob", "logits", logits, SelectedLogprob.dtypes)
    check_ids("selected_logprob", "ids", ids)
    check_temperature("selected_logprob", options.temperature)
    if logits.dim() < 1 or ids.shape != logits.shape[:-1] or logits.shape[-1] == 0:
        raise BadArgument(
            f"selected_logprob: logits is {tuple(logits.shape)}, ids {tuple(ids.shape)}",
            why="logits: (... V) with V at least 1, ids: (...)",
            fix="ids.view(logits.shape[:-1])",
        )
    index = options.ignore_index
    if isinstance(index, bool) or not isinstance(index, int) or not -(2**63) <= index < 2**63:
        what = f"selected_logprob: ignore_index is {index!r}, not an integer of 64 bits"
        raise BadArgument(what, fix="ignore_index=-100")
    check_flag("selected_logprob", "entropy", options.entropy)
    check_flag("selected_logprob", "lse", options.lse)


class _SelectedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, options: Options) -> Any:
        results = forward(logits, ids, options)
        ctx.save_for_backward(logits, ids, results.entropy, results.row_top, results.row_sum)
        ctx.options, ctx.call = options, context.current()
        ctx.set_materialize_grads(False)
        return results[:3]

    @staticmethod
    @first_order("selected_logprob")
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        logits, ids, *known = ctx.saved_tensors
        if all(gradient is None for gradient in upstream):
            return None, None, None
        with context.restored(ctx.call):
            return backward(logits, ids, tuple(known), upstream, ctx.options), None, None


# --- as torch.compile sees it: what is not wanted is an empty tensor -------------------------------------------------


def _run(logits: torch.Tensor, ids: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    made = forward(logits, ids, Options(*options))
    return tuple(made.logp.new_empty(0) if result is None else result for result in made)


def _fake(logits: torch.Tensor, ids: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    options = Options(*given)
    tokens = (ids.numel(),)
    shapes = (ids.shape, ids.shape if options.entropy else (0,), ids.shape if options.lse else (0,), tokens, tokens)
    return tuple(logits.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, ids, *options = inputs
    ctx.save_for_backward(logits, ids, output[1], *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.options = Options(*options)


def _opaque_backward(ctx: Any, *upstream: torch.Tensor) -> Any:
    asked = (True, ctx.options.entropy, ctx.options.lse)
    gradients = [d if is_asked else None for d, is_asked in zip(upstream[:3], asked, strict=True)]
    d_logits = _opaque_gradient(*ctx.saved_tensors, *gradients, *ctx.options)
    return d_logits, *[None] * (1 + len(ctx.options))


def _run_backward(logits: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    return backward(logits, ids, rest[:3], rest[3:6], Options(*rest[6:]))


_OPTIONS = "float temperature, int ignore_index, bool entropy, bool lse"
_opaque_gradient = opaque(
    "selected_logprob_backward(Tensor logits, Tensor ids, Tensor known_entropy, Tensor row_top, Tensor row_sum, "
    f"Tensor? d_logp, Tensor? d_entropy, Tensor? d_lse, {_OPTIONS}) -> Tensor",
    _run_backward,
    lambda logits, *rest: logits.new_empty(logits.shape),
)
_opaque = opaque(
    f"selected_logprob(Tensor logits, Tensor ids, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    save=_save,
    backward=_opaque_backward,
)
