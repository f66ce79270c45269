"""`target.generate(..., assistant_model=drafter)`: the way to the decode loop, and proposals for Transformers' own."""

import functools
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from .call_options_dflash import CallOptions, keywords_of, put_on_config, take_keywords
from .context_dflash import ROUNDS_BEFORE_ALARM, BlockDrafter, warn_of_useless_drafter
from .sampling_dflash import counts_its_calls, draft_processors
from .target_dflash import TargetTaps, check_drafter_fits
from .verify_length_dflash import fixed_proposals

logger = logging.get_logger(__name__)


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposals of a DFlash drafter for one call of Transformers' own assisted decoding.

    `generate(..., assistant_model=drafter)` uses the drafter's `decode` instead, which takes batches, exact stopping
    criteria and more. This class serves loops that ask for a [`CandidateGenerator`].

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
                f"A candidate generator takes one prompt at a time, got a batch of {batch_size}. Batches work with "
                "`generate(assistant_model=drafter)`."
            )
        check_drafter_fits(drafter.config, target)
        options = CallOptions.of_call(generation_config)
        if options.num_tree_nodes:
            raise ValueError(
                f"`num_tree_nodes` is {options.num_tree_nodes!r}, but Transformers' own loop verifies chains. Trees "
                "work with `generate(assistant_model=drafter)`."
            )
        self.max_length = generation_config.max_length
        whole_block = drafter.config.block_size - 1
        self.num_proposals = fixed_proposals(generation_config, drafter.config.block_size) or whole_block
        self.argmax_processors = draft_processors(logits_processor, keep_argmax=True)
        end_ids = getattr(generation_config, "_eos_token_tensor", None)
        self.end_ids = [] if end_ids is None else end_ids.flatten().tolist()
        self.accepted_lengths: list[int] = []
        self._block_drafter = BlockDrafter(drafter, target, [0], draft_window=options.draft_window)
        self._taps = TargetTaps(target, drafter.config.target_layer_ids)
        self._mask_token_id = drafter.config.mask_token_id
        self._num_placeholders = 0
        self._is_after_prefill = False
        self._is_off = False
        if counts_its_calls(logits_processor or LogitsProcessorList()):
            logger.warning("Guidance and SynthID watermarks need one call per token: the drafter is off in this call.")
            self._turn_off()

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
            return torch.cat([input_ids, torch.full_like(input_ids[:, :1], self._mask_token_id)], dim=1), None
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
            self._block_drafter.add_features(features, [features.shape[1]])
            logits = self._block_drafter.logits(input_ids[:, -1:], min(room, self.num_proposals))
            proposals = self._choose(input_ids, logits)
        except RuntimeError as error:  # out of memory is one of these
            self._turn_off()
            logger.warning(f"The drafter failed, so the rest of this answer is decoded without it: {error}")
            return input_ids, None
        return torch.cat([input_ids, proposals], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Records the accepted length of the round that ended; the target's first forward is not a round."""
        if self._is_after_prefill:
            return
        self.accepted_lengths.append(int(num_matches) + 1)
        is_alarm_due = len(self.accepted_lengths) == ROUNDS_BEFORE_ALARM and not self._is_off
        if is_alarm_due and max(self.accepted_lengths) == 1:
            warn_of_useless_drafter()

    def _choose(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.LongTensor:
        if self.argmax_processors:
            tokens = input_ids
            for slot in range(logits.shape[1]):
                scores = self.argmax_processors(tokens, logits[:, slot].float())
                tokens = torch.cat([tokens, scores.argmax(dim=-1, keepdim=True)], dim=1)
            proposals = tokens[:, input_ids.shape[1] :]
        else:
            proposals = logits.max(dim=-1).indices  # argmax() is four times slower on a CPU in bfloat16
        # A proposed end token is left to the target's own choice in the bonus slot: same tokens, no overshoot.
        first_end = next((i for i, token in enumerate(proposals[0].tolist()) if token in self.end_ids), None)
        return proposals[:, :first_end]

    def _turn_off(self) -> None:
        self._is_off = True
        self._taps.remove()


def install_dispatch() -> None:
    """Sends assisted decoding with a DFlash drafter to the drafter; every other call stays as it was.

    Transformers chooses how to decode from the target's config, which knows nothing of the drafter. Four methods of
    [`GenerationMixin`] are wrapped once, whichever copies of this file are imported:
    `_prepare_generation_config`, which puts keywords of [`CallOptions`] on the call's own copy of its config;
    `_validate_generation_mode`, whose limits of assisted decoding do not hold here; `_assisted_decoding`, which goes
    to `drafter.decode`; `_get_candidate_generator`, for code that runs Transformers' own loop. With
    `speculation_type="dflash"` Transformers' own DFlash path is used, as asked.
    """
    for name, wrap in (
        ("_prepare_generation_config", _wrap_preparation),
        ("_validate_generation_mode", _wrap_validation),
        ("_assisted_decoding", _wrap_decoding),
        ("_get_candidate_generator", _wrap_candidates),
    ):
        original = getattr(GenerationMixin, name)
        if not getattr(original, "dispatches_dflash", False):
            wrapper: Any = functools.wraps(original)(wrap(original))
            wrapper.dispatches_dflash = True
            setattr(GenerationMixin, name, wrapper)


def _is_ours(assistant_model: Any, generation_config: GenerationConfig) -> bool:
    return getattr(assistant_model, "is_dflash_drafter", False) and generation_config.speculation_type is None


def _wrap_preparation(original):
    def prepare_generation_config(self, generation_config, *args, **kwargs):
        keywords = take_keywords(kwargs)
        generation_config, model_kwargs = original(self, generation_config, *args, **kwargs)
        put_on_config(generation_config, keywords)
        return generation_config, model_kwargs

    return prepare_generation_config


def _wrap_validation(original):
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        keywords = keywords_of(generation_config)
        is_drafted = _is_ours(generation_mode_kwargs.get("assistant_model"), generation_config)
        if keywords and not (is_drafted and generation_mode == GenerationMode.ASSISTED_GENERATION):
            raise ValueError(
                f"{' and '.join(f'`{name}`' for name in keywords)} steer decoding with a DFlash drafter, and this "
                "call has none that takes part. Leave them out, or pass `assistant_model=drafter` (without beams and "
                "`speculation_type`) or `custom_generate=drafter.decode`."
            )
        if is_drafted:
            others = {name: value for name, value in generation_mode_kwargs.items() if "assistant" not in name}
            if generation_mode == GenerationMode.ASSISTED_GENERATION:
                generation_mode = (
                    GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
                )
            return original(self, generation_mode, generation_config, others)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate_generation_mode


def _wrap_decoding(original):
    def assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        generation_config = kwargs.get("generation_config")
        if generation_config is None or not _is_ours(assistant_model, generation_config):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        for unused in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(unused, None)
        return assistant_model.decode(self, input_ids, *args, **kwargs)

    return assisted_decoding


def _wrap_candidates(original):
    def get_candidate_generator(self, generation_config, input_ids, *args, assistant_model=None, **kwargs):
        if not _is_ours(assistant_model, generation_config):
            return original(self, generation_config, input_ids, *args, assistant_model=assistant_model, **kwargs)
        generator = assistant_model.candidate_generator(
            self,
            generation_config=generation_config,
            logits_processor=kwargs.get("logits_processor"),
            batch_size=input_ids.shape[0],
        )
        _start_from_prompt(kwargs.get("model_kwargs") or {}, generation_config, input_ids.shape[1])
        return generator

    return get_candidate_generator


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
