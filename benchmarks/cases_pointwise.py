"""Cases of the operators that work element by element or copy: swiglu, rope, ratios and losses, embedding, packing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from operator_cases import DEVICE, Aim, Case, sized

from kalign_core import ops
from kalign_core.ops.embedding import backward as embedding_backward_of
from kalign_core.ops.embedding import forward as embedding_of
from kalign_core.ops.grpo_loss import Numbers, Tokens
from kalign_core.ops.grpo_loss import backward as grpo_loss_backward_of
from kalign_core.ops.grpo_loss import forward as grpo_loss_of
from kalign_core.ops.pack import packed_of, padded_of
from kalign_core.ops.ratio_kl import backward as ratio_kl_backward_of
from kalign_core.ops.ratio_kl import forward as ratio_kl_of
from kalign_core.ops.rope import backward as rope_backward_of
from kalign_core.ops.rope import forward as rope_of
from kalign_core.ops.swiglu import backward as swiglu_backward_of
from kalign_core.ops.swiglu import forward as swiglu_of

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def normals(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def uniforms(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


# --- swiglu -------------------------------------------------------------------------------------------------------


def _swiglu(t: int, f: int, *aims: Aim) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return normals(t, f, seed=2 * seed), normals(t, f, seed=2 * seed + 1)

    def liger() -> Any:
        from liger_kernel.ops.swiglu import swiglu_forward

        return lambda gate, up: swiglu_forward(gate, up)[2]

    return Case(
        "pointwise", "swiglu", "forward", {"T": t, "F": f}, make,
        ours=swiglu_of, moved=2 * 3 * t * f, tuned=lambda: (ops.swiglu, make(0)),
        torch=lambda gate, up: torch.nn.functional.silu(gate) * up, others={"liger": liger}, aims=aims,
    )  # fmt: skip


def _swiglu_backward(t: int, f: int, *aims: Aim) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return tuple(normals(t, f, seed=3 * seed + i) for i in range(3))

    def eager(gate: Any, up: Any, d: Any) -> Any:
        return torch.ops.aten.silu_backward(d * up, gate), d * torch.nn.functional.silu(gate)

    def formula(gate: Any, up: Any, d: Any) -> Any:
        g, u, d = gate.float(), up.float(), d.float()
        s = torch.sigmoid(g)
        return (d * u * (s * (1 + g * (1 - s)))).to(gate.dtype), (d * (g * s)).to(gate.dtype)

    def liger() -> Any:
        from liger_kernel.ops.swiglu import swiglu_backward

        return lambda gate, up, d: swiglu_backward(gate, up, d)  # in place: fewer lines to fetch

    return Case(
        "pointwise", "swiglu", "backward", {"T": t, "F": f}, make,
        ours=swiglu_backward_of, moved=2 * 5 * t * f,
        tuned=lambda: (ops.swiglu, tuple(x.requires_grad_() for x in make(0)[:2])),
        torch=eager, compiled=formula, others={"liger": liger}, aims=aims,
    )  # fmt: skip


# --- rope ---------------------------------------------------------------------------------------------------------


def _rope(t: int, heads: int, d: int, *aims: Aim, interleaved: bool = False, back: bool = False) -> Case:
    kv = heads // 5  # of 40 heads 32 are queries and 8 keys, which is how one peer takes them

    def make(seed: int) -> tuple[Any, ...]:
        angle = 7 * uniforms(t, d // 2, seed=seed)
        q, k = normals(1, t, heads - kv, d, seed=seed + 1), normals(1, t, kv, d, seed=seed + 2)
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        return torch.cat((q, k), 2)[0], cos, sin, q, k, torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)

    def formula(x: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        c, s = cos.float().unsqueeze(1), -sin.float().unsqueeze(1) if back else sin.float().unsqueeze(1)
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        first, second = a * c - b * s, b * c + a * s
        if interleaved:
            return torch.stack((first, second), -1).flatten(-2).to(x.dtype)
        return torch.cat((first, second), -1).to(x.dtype)

    def liger() -> Any:
        from liger_kernel.ops.rope import rope_backward, rope_forward

        turn = rope_backward if back else rope_forward
        return lambda x, c, s, q, k, cos, sin: turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)  # in place

    def ours(x: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        if back:
            return rope_backward_of(cos, sin, x, interleaved)
        return rope_of(x, cos, sin, interleaved)

    what = ("interleaved " if interleaved else "") + ("backward" if back else "forward")
    return Case(
        "pointwise", "rope", what, {"T": t, "heads": heads, "D": d}, make,
        ours=ours, moved=2 * (2 * t * heads * d + t * d), tuned=lambda: (ops.rope, (*make(0)[:3], interleaved)),
        torch=formula, others={} if interleaved or heads % 5 else {"liger": liger}, aims=aims,
    )  # fmt: skip


# --- ratios and losses --------------------------------------------------------------------------------------------


def _policies(b: int, s: int, seed: int, dtype: torch.dtype) -> tuple[Any, ...]:
    logp = normals(b, s, seed=seed, dtype=dtype)
    old, ref = (logp + 0.1 * normals(b, s, seed=seed + i, dtype=dtype) for i in (1, 2))
    return logp, old, ref, uniforms(b, s, seed=seed + 3) < 0.8


def _k3(x: Any) -> Any:
    return torch.exp(x) - 1 - x


def _ratio_kl(b: int, s: int, dtype: torch.dtype) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return _policies(b, s, 4 * seed, dtype)

    def formula(logp: Any, old: Any, ref: Any, mask: Any) -> Any:
        p = logp.float()
        x = ref.float() - p
        results = (torch.exp(p - old.float()), -x, 0.5 * x * x, _k3(x))
        return tuple(torch.where(mask, result, 0.0).to(logp.dtype) for result in results)

    return Case(
        "pointwise", "ratio_kl", f"forward {NAMES[dtype]}", {"B": b, "S": s}, make,
        ours=lambda *given: tuple(ratio_kl_of(*given)), moved=b * s * (7 * dtype.itemsize + 1),
        tuned=lambda: (ops.ratio_kl, make(0)), torch=formula, aims=(FASTER,),
    )  # fmt: skip


def _ratio_kl_backward(b: int, s: int, dtype: torch.dtype) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return *_policies(b, s, 8 * seed, dtype), *(normals(b, s, seed=8 * seed + i, dtype=dtype) for i in range(4, 8))

    def formula(logp: Any, old: Any, ref: Any, mask: Any, *gradients: Any) -> Any:
        d_ratio, d_k1, d_k2, d_k3 = (d.float() for d in gradients)
        p = logp.float()
        x = ref.float() - p
        d = d_ratio * torch.exp(p - old.float()) + d_k1 - d_k2 * x + d_k3 * (1 - torch.exp(x))
        return torch.where(mask, d, 0.0).to(logp.dtype)

    return Case(
        "pointwise", "ratio_kl", f"backward {NAMES[dtype]}", {"B": b, "S": s}, make,
        ours=ratio_kl_backward_of, moved=b * s * (8 * dtype.itemsize + 1),
        tuned=lambda: (ops.ratio_kl, (make(0)[0].requires_grad_(), *make(0)[1:4])), torch=formula, aims=(FASTER,),
    )  # fmt: skip


# Asked of forward and backward in every dtype.
FASTER = Aim(over="torch.compile", ratio=1.1)
BETA = 0.04
MEANS = {"token": Numbers(0.8, 1.2, BETA, "token", None),
         "sequence": Numbers(0.8, 1.2, BETA, "sequence", None)}  # fmt: skip


def _grpo_tokens(logp: Any, old: Any, ref: Any, advantages: Any) -> Any:
    p, a = logp.float(), advantages.float().unsqueeze(1)
    ratio, x = torch.exp(p - old.float()), ref.float() - p
    return BETA * _k3(x) - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)


def _grpo_loss(b: int, s: int, dtype: torch.dtype, mean: str = "token") -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        logp, old, ref, mask = _policies(b, s, 5 * seed, dtype)
        return logp, old, ref, normals(b, seed=5 * seed + 4, dtype=dtype), mask

    def formula(logp: Any, old: Any, ref: Any, advantages: Any, mask: Any) -> Any:
        losses = torch.where(mask, _grpo_tokens(logp, old, ref, advantages), 0.0)
        if mean == "token":
            return losses.sum() / mask.sum().clamp(min=1)
        counts = mask.sum(1)
        return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)

    return Case(
        "pointwise", "grpo_loss", f"{mean} forward {NAMES[dtype]}", {"B": b, "S": s}, make,
        ours=lambda *given: grpo_loss_of(Tokens(*given), MEANS[mean])[0],
        moved=b * s * (3 * dtype.itemsize + 1), tuned=lambda: (ops.grpo_loss, (*make(0), 0.2, 0.2, BETA, mean)),
        torch=formula, aims=(FASTER,),
    )  # fmt: skip


def _grpo_loss_backward(b: int, s: int, dtype: torch.dtype) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        logp, old, ref, mask = _policies(b, s, 5 * seed, dtype)
        advantages, d = normals(b, seed=5 * seed + 4, dtype=dtype), torch.ones((), device=DEVICE)
        return logp, old, ref, advantages, mask, 1.0 / mask.sum(), d

    def formula(logp: Any, old: Any, ref: Any, advantages: Any, mask: Any, share: Any, d: Any) -> Any:
        p, a = logp.float(), advantages.float().unsqueeze(1)
        ratio, x = torch.exp(p - old.float()), ref.float() - p
        plain, clipped = ratio * a, ratio.clamp(0.8, 1.2) * a
        slope = BETA * (1 - torch.exp(x)) - torch.where(clipped < plain, 0.0, plain)
        return torch.where(mask, d * share * slope, 0.0).to(logp.dtype)

    def ours(logp: Any, old: Any, ref: Any, advantages: Any, mask: Any, share: Any, d: Any) -> Any:
        tokens = Tokens(logp, old, ref, advantages, mask)
        return grpo_loss_backward_of(tokens, MEANS["token"], share, None, d)

    return Case(
        "pointwise", "grpo_loss", f"backward {NAMES[dtype]}", {"B": b, "S": s}, make,
        ours=ours, moved=b * s * (4 * dtype.itemsize + 1),
        tuned=lambda: (ops.grpo_loss, (make(0)[0].requires_grad_(), *make(0)[1:5])), torch=formula, aims=(FASTER,),
    )  # fmt: skip


def _group_advantage(b: int, g: int) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return (normals(b, g, seed=seed, dtype=torch.float32),)

    def formula(rewards: Any) -> Any:
        centred = rewards - rewards.mean(1, keepdim=True)
        alike = (rewards == rewards[:, :1]).all(1, keepdim=True)
        return torch.where(alike, 0.0, centred / rewards.std(1, keepdim=True))

    return Case(
        "pointwise", "group_advantage", "forward fp32", {"B": b, "G": g}, make,
        ours=lambda rewards: ops.group_advantage(rewards, g), moved=4 * 2 * b * g,
        tuned=lambda: (ops.group_advantage, (*make(0), g)), torch=formula,
    )  # fmt: skip


# --- copies -------------------------------------------------------------------------------------------------------


def _ids(t: int, v: int, seed: int) -> torch.Tensor:
    """As in text, few numbers make up much of it: the most frequent is every twentieth token."""
    return (v * uniforms(t, seed=seed) ** 4).long().clamp_(max=v - 1)


def _embedding(t: int, v: int, h: int) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return _ids(t, v, seed), normals(v, h, seed=0)

    def liger() -> Any:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return lambda ids, table: LigerEmbeddingFunction.apply(table, ids)

    return Case(
        "pointwise", "embedding", "forward", {"T": t, "V": v, "H": h}, make,
        ours=embedding_of, moved=2 * 2 * t * h + 8 * t, tuned=lambda: (ops.embedding, make(0)),
        torch=torch.nn.functional.embedding, others={"liger": liger},
    )  # fmt: skip


def _embedding_backward(t: int, v: int, h: int) -> Case:
    table = torch.empty((), dtype=torch.bfloat16, device=DEVICE).expand(v, h)

    def make(seed: int) -> tuple[Any, ...]:
        return _ids(t, v, 2 * seed), normals(t, h, seed=2 * seed + 1)

    def tuned() -> tuple[Any, tuple[Any, ...]]:
        return ops.embedding, (make(0)[0], table.new_empty(v, h).requires_grad_())

    def liger() -> Any:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        def back(ids: Any, d: Any) -> Any:  # by atomics, which round every addition
            return LigerEmbeddingFunction.backward(SimpleNamespace(saved_tensors=(ids, table)), d)[0]

        return back

    return Case(
        "pointwise", "embedding", "backward", {"T": t, "V": v, "H": h}, make,
        ours=lambda ids, d: embedding_backward_of(ids, table, d), moved=2 * (t * h + v * h) + 8 * t,
        tuned=tuned, torch=lambda ids, d: torch.ops.aten.embedding_dense_backward(d, ids, v, -1, False),
        others={"liger": liger},
    )  # fmt: skip


def _varlen(b: int, s: int, f: int) -> list[Case]:
    lengths = (s // 2 + (s // 2 + 1) * uniforms(b, seed=0)).long()
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    total = int(ends[-1])
    places = (torch.arange(s, device=DEVICE) < lengths[:, None]).view(-1).nonzero().view(-1)

    def padded(seed: int) -> tuple[Any, ...]:
        return (normals(b, s, f, seed=seed),)

    def packed(seed: int) -> tuple[Any, ...]:
        return (normals(total, f, seed=seed),)

    sizes = {"B": b, "S": s, "F": f}
    return [
        Case(
            "pointwise", "pack", "forward", sizes, padded,
            ours=lambda x: packed_of(x, ends, total, "right"), moved=2 * 2 * total * f,
            tuned=lambda: (ops.pack, (*padded(0), ends, total)), torch=lambda x: x.view(-1, f).index_select(0, places),
        ),
        Case(
            "pointwise", "unpack", "forward", sizes, packed,
            ours=lambda x: padded_of(x, ends, s, "right"), moved=2 * f * (total + b * s),
            tuned=lambda: (ops.unpack, (*packed(0), ends, s)),
            torch=lambda x: x.new_zeros(b * s, f).index_copy_(0, places, x).view(b, s, f),
        ),
    ]  # fmt: skip


CASES = [
    _swiglu(*sized(8192, 12288), Aim(share=0.98)),
    _swiglu_backward(*sized(8192, 12288), Aim(share=0.92)),
    _rope(*sized(8192, 40, 128), Aim(share=0.88)),
    _rope(*sized(8192, 40, 128), Aim(share=0.88), back=True),
    _rope(*sized(8192, 40, 128), Aim(share=0.88), interleaved=True),
    _rope(*sized(8192, 8, 128)),
    *(make(*sized(64, 8192), dtype) for dtype in NAMES for make in (_ratio_kl, _ratio_kl_backward, _grpo_loss,
                                                                    _grpo_loss_backward)),
    _grpo_loss(*sized(64, 8192), torch.bfloat16, "sequence"),
    _group_advantage(*sized(1024, 16)),
    _embedding(*sized(8192, 151936, 4096)),
    _embedding_backward(*sized(8192, 151936, 4096)),
    *_varlen(*sized(64, 1024, 4096)),
]  # fmt: skip
