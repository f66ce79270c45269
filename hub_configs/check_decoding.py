"""Whether a drafter's weights, the target's taps and real decoding are sound."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_hf.context_dflash import BlockDrafter
from dflash_hf.eval.metrics import acceptance_per_slot
from dflash_hf.hub_configs.check_report import SMALL_TAU, USELESS_TAU, Finding
from dflash_hf.target_dflash import TargetTaps, decoder_layers
from dflash_hf.trainer.feature_store import refuse_constant
from dflash_hf.trainer.target_features import input_device, target_logits

_FLOAT16_MAX = torch.finfo(torch.float16).max
_FETCH_AGAIN = "fetch the checkpoint again, or take an earlier one of the training"


def check_weights(drafter: PreTrainedModel) -> list[Finding]:
    """Findings about tensors that cannot be those of a trained drafter."""
    tensors = drafter.state_dict()
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        return [Finding("weights", "error", f"NaN or infinite: {_shortened(broken)}", _FETCH_AGAIN)]
    zero = [name for name, tensor in tensors.items() if not name.endswith("bias") and not tensor.any()]
    if zero:
        # Without these nothing of the context, or nothing at all, comes through.
        is_fatal = any(name.startswith(("fc.", "hidden_norm.", "norm.")) for name in zero)
        text = f"all zero: {_shortened(zero)}"
        return [Finding("weights", "error" if is_fatal else "warning", text, _FETCH_AGAIN)]
    layer_ids = drafter.config.target_layer_ids
    blocks = drafter.fc.weight.chunk(len(layer_ids), dim=1)
    unread = [layer_id for layer_id, block in zip(layer_ids, blocks, strict=True) if not block.any()]
    if unread:
        text = f"`fc` gives the tapped layers {unread} no weight"
        return [Finding("weights", "warning", text, "check `target_layer_ids` and the training")]
    return [Finding("weights", "ok", f"{len(tensors)} tensors, all finite, none of them zero")]


@torch.no_grad()
def check_taps(target: PreTrainedModel, layer_ids: list[int], input_ids: torch.LongTensor) -> list[Finding]:
    """Findings about the target's hidden states: right layers, alive, and enough to rebuild its logits.

    Args:
        input_ids (`torch.LongTensor`): A text, shape (1, tokens).
    """
    last = len(decoder_layers(target)) - 1
    with TargetTaps(target, [*layer_ids, last]) as taps:
        output = target(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        features = taps.take().chunk(len(layer_ids) + 1, dim=-1)
    findings = []
    for layer_id, values in zip(layer_ids, features, strict=False):
        try:
            refuse_constant(values, [layer_id], "a prompt")
            expected = output.hidden_states[layer_id + 1] if output.hidden_states else values
            if not torch.equal(values, expected.to(values.device)):
                text = f"the output of layer {layer_id} is not `hidden_states[{layer_id + 1}]`"
                advice = "layers are finished elsewhere, or counted otherwise: rely on the measured tau, and report it"
                findings.append(Finding("taps", "warning", text, advice))
        except ValueError as error:
            findings.append(Finding("taps", "error", str(error), "load the target anew, in bfloat16 or float32"))
    if not findings:
        findings.append(Finding("taps", "ok", f"layers {layer_ids} are finite and vary"))
    return [*findings, _rebuilt_logits(target, features[-1], output.logits, input_ids)]


def _rebuilt_logits(
    target: PreTrainedModel, last_tap: torch.Tensor, logits: torch.Tensor, input_ids: torch.LongTensor
) -> Finding:
    """Logits from the last layer's output, through the final norm if it is where it usually is, and the head."""
    decoder = target.get_decoder()
    norm = getattr(decoder, "norm", None)
    place = "the last layer's output" if norm is not None else "the last hidden states"
    if norm is not None:
        hidden_states = norm(last_tap)
    else:
        hidden_states = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    rebuilt = target_logits(target, hidden_states).to(logits.device, torch.float32)
    difference = (rebuilt - logits).abs().max().item() if rebuilt.shape == logits.shape else float("inf")
    # Kernels may round otherwise where shapes differ.
    if difference <= 1e-2 * max(1.0, logits.abs().max().item()):
        return Finding("logits", "ok", f"rebuilt from {place} (largest difference {difference:.2g})")
    return Finding(
        "logits",
        "warning",
        f"{place} and the head do not give the target's logits (largest difference {difference:.2g})",
        "the target does more behind its layers: rely on the measured tau, train with `label_source` 'data'",
    )


@torch.no_grad()
def check_forward(target: PreTrainedModel, drafter: PreTrainedModel, input_ids: torch.LongTensor) -> list[Finding]:
    """Findings about one draft, as decoding makes it: finite logits, and values that float16 could hold.

    Args:
        input_ids (`torch.LongTensor`): A text, shape (1, tokens), at least two.
    """
    with TargetTaps(target, drafter.config.target_layer_ids) as taps:
        target(input_ids=input_ids[:, :-1], use_cache=False)
        features = taps.take()
    block_drafter = BlockDrafter(drafter, target, [0])
    block_drafter.add_features(features, [features.shape[1]])
    with _Peak(drafter) as peak:
        try:
            logits = block_drafter.logits(input_ids[:, -1:], drafter.config.block_size - 1)
        except RuntimeError as error:
            return [Finding("draft", "error", str(error), "load the drafter in bfloat16 or float32")]
    if not logits.isfinite().all():
        text = f"the draft logits are not finite ({dtype_name(drafter.dtype)})"
        return [
            Finding("draft", "error", text, "load the drafter in bfloat16 or float32; else its weights are broken")
        ]
    findings = [Finding("draft", "ok", f"{logits.shape[1]} slots, finite, {dtype_name(drafter.dtype)}")]
    if peak.value > _FLOAT16_MAX:
        text = f"values reach {peak.value:.3g} in {peak.module}, more than float16 holds (65504)"
        findings.append(Finding("float16", "note", text, "keep to bfloat16 or float32"))
    return findings


class _Peak:
    """Largest absolute value that goes into or comes out of a leaf module."""

    def __init__(self, model: nn.Module):
        self.value = 0.0
        self.module = ""
        leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
        self._handles = [module.register_forward_hook(self._recorder(name)) for name, module in leaves]

    def _recorder(self, name: str):
        def record(module, arguments, output):
            for value in (*arguments, output):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                    peak = value.abs().max().item()
                    if peak > self.value:
                        self.value, self.module = peak, name

        return record

    def __enter__(self) -> "_Peak":
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()


def check_decoding(
    target: PreTrainedModel, drafter: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> tuple[list[Finding], dict[str, float]]:
    """Findings about greedy answers with whole blocks, against plain ones, and the figures behind them.

    Args:
        prompts: Token ids of each prompt.
        max_new_tokens (`int`): Longest answer.
    Returns:
        The findings, and besides the figures of [`measure`] `prompts` and `identical`, the share of equal answers.
    """
    drafted, figures = measure(target, drafter, prompts, max_new_tokens)
    plain = [_greedy(target, prompt, max_new_tokens).sequences for prompt in prompts]
    num_identical = sum(map(torch.equal, drafted, plain))
    findings = [_identity(num_identical, len(prompts), target.dtype)]
    if "tau" in figures:
        findings.append(_tau(figures, drafter.config.block_size))
    return findings, figures | {"prompts": len(prompts), "identical": num_identical / len(prompts)}


def measure(
    target: PreTrainedModel, drafter: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Greedy answers with whole blocks, and `rounds`, `tau` and `acceptance_slot_k` of all their rounds."""
    options = {"assistant_model": drafter, "num_assistant_tokens": drafter.config.block_size - 1}
    outputs = [_greedy(target, prompt, max_new_tokens, **options) for prompt in prompts]
    lengths = [output.accepted_lengths[0] for output in outputs]
    figures: dict[str, float] = {"rounds": sum(map(len, lengths))}
    acceptance = acceptance_per_slot(lengths, drafter.config.block_size)
    if acceptance is not None:
        figures["tau"] = 1 + sum(acceptance)
        figures |= {f"acceptance_slot_{slot}": share for slot, share in enumerate(acceptance, start=1)}
    return [output.sequences for output in outputs], figures


def _greedy(target: PreTrainedModel, prompt: list[int], max_new_tokens: int, **options: Any) -> Any:
    input_ids = torch.tensor([prompt], device=input_device(target))
    return target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        **options,
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _identity(num_identical: int, num_prompts: int, dtype: torch.dtype) -> Finding:
    text = f"{num_identical} of {num_prompts} answers equal plain greedy ones ({dtype_name(dtype)})"
    if num_identical == num_prompts:
        return Finding("identity", "ok", text)
    if dtype != torch.float32:
        return Finding("identity", "note", f"{text}; where two tokens are nearly as likely, rounding decides")
    return Finding("identity", "error", text, "a fault in decoding, not in the drafter: report it with both names")


def _tau(figures: dict[str, float], block_size: int) -> Finding:
    tau, first = figures["tau"], figures["acceptance_slot_1"]
    text = f"{tau:.2f} tokens per forward of the target, of at most {block_size}; first proposal right {first:.0%}"
    if tau < USELESS_TAU:
        advice = (
            "the drafter is useless here: its weights may belong to another target, revision or config, or its "
            "training saw other texts (template mode, language); train it on this target's own answers"
        )
        return Finding("tau", "warning", text, advice)
    if tau < SMALL_TAU:
        return Finding("tau", "note", text, "a small gain; measure speed with `dflash-eval` on texts like yours")
    return Finding("tau", "ok", text)


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
