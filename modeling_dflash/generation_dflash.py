"""DFlash inside Transformers' assisted decoding: `target.generate(..., assistant_model=drafter)`."""

import functools
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from .target_dflash import TargetTaps, check_drafter_fits, draft_logits, embed_tokens

logger = logging.get_logger(__name__)

# These never change which token is most likely, so greedy proposals need not apply them.
_KEEP_ARGMAX = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
# These count their calls, so scores of tokens that are then rejected would change the text.
_ONE_CALL_PER_TOKEN = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
_ROUNDS_BEFORE_ALARM = 48


class ContextCache:
    """Keys and values of the drafter's context features, in buffers that grow by doubling.

    A block's own keys are written behind the context and overwritten in the next round, so nothing is ever cropped.
    """

    def __init__(self, num_layers: int):
        self._keys: list[Any] = [None] * num_layers
        self._values: list[Any] = [None] * num_layers
        self._length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Context tokens held."""
        return self._length

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All context keys and values, then the block's; `key` and `value` are (batch, heads, new, head_dim)."""
        needed = self._length + key.shape[2]
        for buffers, states in ((self._keys, key), (self._values, value)):
            buffer = buffers[layer_idx]
            if buffer is None or buffer.shape[2] < needed:
                grown = states.new_empty(*states.shape[:2], 2 * needed, states.shape[3])
                if buffer is not None:
                    grown[:, :, : self._length] = buffer[:, :, : self._length]
                buffers[layer_idx] = buffer = grown
            buffer[:, :, self._length : needed] = states
        return self._keys[layer_idx][:, :, :needed], self._values[layer_idx][:, :, :needed]

    def keep_context(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` rows of the last update; the block's rows behind them are given up."""
        self._length += num_tokens


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposals of a DFlash drafter for one `generate()` call; holds that call's drafter cache.

    Proposals are the drafter's most likely tokens. No draft probabilities are returned: Transformers then keeps a
    proposal exactly if the target chose the same token, greedily or by its own draw, so the output's distribution is
    the target's (a point-mass q in the terms of speculative sampling).

    Args:
        drafter ([`DFlashDraftModel`]): The drafter.
        target ([`PreTrainedModel`]): The target whose `generate()` runs.
        generation_config ([`GenerationConfig`]): The call's settings; `num_assistant_tokens` below the block's
            `block_size - 1` verifies fewer proposals of a full-width draft.
        logits_processor ([`LogitsProcessorList`], *optional*): Those of the call; ones that can change the most likely
            token are applied to the draft, slot by slot.
        batch_size (`int`): Prompts of the call; must be 1.
    Raises:
        ValueError: If the drafter does not fit the target, the batch has several rows, or more proposals than the
            drafter was trained for are asked for.
    """

    requires_model_outputs: bool = True
    # Hooks bring the tapped layers; asking the target for hidden states would keep every layer on older versions.
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        *,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        batch_size: int = 1,
    ):
        if batch_size != 1:
            raise ValueError(
                f"DFlash drafting takes one prompt at a time, got a batch of {batch_size}. Call generate() per prompt."
            )
        check_drafter_fits(drafter.config, target)
        self.drafter = drafter
        self.target = target
        self.max_length = generation_config.max_length
        self.num_proposals = _num_proposals(generation_config, drafter.config.block_size)
        self.argmax_processors = LogitsProcessorList(
            processor for processor in logits_processor or () if not isinstance(processor, _KEEP_ARGMAX)
        )
        end_ids = getattr(generation_config, "_eos_token_tensor", None)
        self.end_ids = [] if end_ids is None else end_ids.flatten().tolist()
        self.accepted_lengths: list[int] = []
        self._taps = TargetTaps(target, drafter.config.target_layer_ids)
        self._cache = ContextCache(drafter.config.num_hidden_layers)
        self._mask_ids = torch.full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)
        self._num_context = 0
        self._num_placeholders = 0
        self._is_after_prefill = False
        self._is_off = any(isinstance(processor, _ONE_CALL_PER_TOKEN) for processor in logits_processor or ())
        if self._is_off:
            logger.warning("Guidance and SynthID watermarks need one call per token: the drafter is off in this call.")

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs,
    ) -> tuple[torch.LongTensor, None]:
        """`input_ids` with proposals appended, shape (1, tokens + proposals), and no draft probabilities."""
        if is_first_iteration:
            # Proposals need the target's hidden states, so the target reads the prompt first.
            self._is_after_prefill = True
            if self._is_off or not input_ids.shape[1] or int(input_ids[0, -1]) not in self.end_ids:
                return input_ids, None
            # Transformers 5.15 takes a prompt that ends in an end token for a finished text, unless more follows.
            self._num_placeholders = 1
            return torch.cat([input_ids, self._mask_ids[:, :1].to(input_ids.device)], dim=1), None
        room = self.max_length - input_ids.shape[1] - 1
        is_after_prefill, self._is_after_prefill = self._is_after_prefill, False
        if self._is_off or room < 1:
            return input_ids, None
        try:
            features = self._taps.take()
            if is_after_prefill:
                num_rejected = self._num_placeholders - int(n_last_matches)
                features = features[:, : features.shape[1] - num_rejected]
                mask = (model_kwargs or {}).get("attention_mask")
                if mask is not None and mask.dim() == 2:
                    features = features[:, mask[0, : features.shape[1]].bool()]
            else:
                features = features[:, : int(n_last_matches) + 1]
            self._num_context += features.shape[1]
            proposals = self._draft(input_ids, features, min(room, self.num_proposals))
        except RuntimeError as error:  # out of memory is one of these
            self._is_off = True
            logger.warning(f"The drafter failed, so the rest of this answer is decoded without it: {error}")
            return input_ids, None
        return torch.cat([input_ids, proposals], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Records the accepted length of the round that ended; the target's first forward is not a round."""
        if self._is_after_prefill:
            return
        self.accepted_lengths.append(int(num_matches) + 1)
        is_alarm_due = len(self.accepted_lengths) == _ROUNDS_BEFORE_ALARM and not self._is_off
        if is_alarm_due and max(self.accepted_lengths) == 1:
            logger.warning_once(
                f"No proposal was accepted in {_ROUNDS_BEFORE_ALARM} rounds. The output is right, but slow: check "
                "that the drafter belongs to this target, its dtype, and the chat template that it was trained with."
            )

    def _draft(self, input_ids: torch.LongTensor, features: torch.Tensor, num_proposals: int) -> torch.LongTensor:
        drafter, config = self.drafter, self.drafter.config
        block_ids = torch.cat([input_ids[:, -1:], self._mask_ids.to(input_ids.device)], dim=1)
        noise_embeds = embed_tokens(self.target, block_ids, config).to(drafter.device, drafter.dtype)
        start = self._num_context - features.shape[1]
        positions = torch.arange(start, self._num_context + config.block_size, device=drafter.device)
        hidden_states = drafter(
            noise_embeds=noise_embeds,
            context_hidden_states=features.to(drafter.device, drafter.dtype),
            position_ids=positions.unsqueeze(0),
            cache=self._cache,
        ).last_hidden_state
        self._cache.keep_context(features.shape[1])
        # The block is drafted at full width, as in training; a shorter request only verifies fewer slots.
        logits = draft_logits(self.target, hidden_states[:, 1 : num_proposals + 1], config).to(input_ids.device)
        proposals = self._choose(input_ids, logits)
        # A proposed end token is left to the target's own choice in the bonus slot: same tokens, no overshoot.
        if self.end_ids:
            first_end = next((i for i, token in enumerate(proposals[0].tolist()) if token in self.end_ids), None)
            proposals = proposals[:, :first_end]
        return proposals

    def _choose(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.LongTensor:
        if not self.argmax_processors:
            return logits.max(dim=-1).indices  # argmax() is four times slower on a CPU in bfloat16
        tokens = input_ids
        for slot in range(logits.shape[1]):
            scores = self.argmax_processors(tokens, logits[:, slot].float())
            tokens = torch.cat([tokens, scores.argmax(dim=-1, keepdim=True)], dim=1)
        return tokens[:, input_ids.shape[1] :]


def install_dispatch() -> None:
    """Sends assisted decoding with a DFlash drafter to its candidate generator; every other call stays as it was.

    Transformers picks the candidate generator from the target's config, which knows nothing of the drafter. One
    method, `GenerationMixin._get_candidate_generator`, is wrapped once, whichever copies of this file are imported.
    With `speculation_type="dflash"` Transformers' own DFlash generator is used, as asked.
    """
    original = GenerationMixin._get_candidate_generator
    if getattr(original, "dispatches_dflash", False):
        return

    @functools.wraps(original)
    def get_candidate_generator(self, generation_config, input_ids, *args, assistant_model=None, **kwargs):
        is_ours = getattr(assistant_model, "is_dflash_drafter", False) and generation_config.speculation_type is None
        if not is_ours:
            return original(self, generation_config, input_ids, *args, assistant_model=assistant_model, **kwargs)
        generator = assistant_model.candidate_generator(
            self,
            generation_config=generation_config,
            logits_processor=kwargs.get("logits_processor"),
            batch_size=input_ids.shape[0],
        )
        _start_from_prompt(kwargs.get("model_kwargs") or {}, generation_config, input_ids.shape[1])
        return generator

    get_candidate_generator.dispatches_dflash = True  # type: ignore[attr-defined]
    GenerationMixin._get_candidate_generator = get_candidate_generator


def spec_generate(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    max_new_tokens: int,
    stop_token_ids: list[int] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> torch.LongTensor:
    """Prompt and answer, by the call that users of the authors' code know; `target.generate` has far more options.

    Args:
        input_ids (`torch.LongTensor`): One prompt, shape (1, tokens).
        stop_token_ids (`list[int]`, *optional*): Tokens that end the answer; default: the target's own.
        temperature (`float`): 0 decodes greedily.
    Returns:
        `torch.LongTensor` of shape (1, prompt + new tokens).
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    options: dict[str, Any] = sampling if temperature > 0 else {"do_sample": False}
    if stop_token_ids is not None:
        options["eos_token_id"] = stop_token_ids
    return target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=drafter,
        max_new_tokens=max_new_tokens,
        **options,
    )


def _start_from_prompt(model_kwargs: dict[str, Any], generation_config: GenerationConfig, num_tokens: int) -> None:
    """Empties a given cache: assisted decoding reads all of `input_ids`, also those tokens that the cache holds."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and mask.shape[1] != num_tokens:
        raise ValueError(
            f"`attention_mask` covers {mask.shape[1]} tokens and `input_ids` has {num_tokens}. Assisted decoding "
            "needs the whole prompt as `input_ids`."
        )
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    # Transformers 5.24 drops a mask of ones and keeps its length here; a longer one means `input_ids` are all new.
    has_only_new_tokens = (getattr(generation_config, "_mask_length", None) or num_tokens) > num_tokens
    if cache is not None and cache.get_seq_length() and not has_only_new_tokens:
        cache.crop(-cache.get_seq_length())


def _num_proposals(generation_config: GenerationConfig, block_size: int) -> int:
    asked = generation_config.num_assistant_tokens
    # generate() fills in its own default for assistant models; a drafter's default is its whole block.
    library_default = GenerationConfig._get_default_generation_params().get("num_assistant_tokens")
    if asked is None or asked == library_default:
        return block_size - 1
    if not 1 <= asked <= block_size - 1:
        raise ValueError(
            f"`num_assistant_tokens` is {asked}, but this drafter proposes 1 to {block_size - 1} tokens "
            f"(`block_size` {block_size} counts the anchor). It cannot draft longer blocks than it was trained for."
        )
    return asked
