"""The decode loop of DFlash: draft a block, verify it in one target forward, keep what plain decoding would choose."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .acceptance_dflash import Acceptance, process
from .call_options_dflash import CallOptions
from .committed_text_dflash import CommittedText
from .compilation_dflash import compile_options
from .context_dflash import ROUNDS_BEFORE_ALARM, BlockDrafter, warn_of_useless_drafter
from .outputs_dflash import DFlashGenerateOutput, OutputRecorder
from .round_policy_dflash import RoundPolicy
from .sampling_dflash import StepNoise, counts_its_calls, draft_processors, is_prefix_free
from .static_draft_dflash import StaticBlockDrafter, can_be_static
from .target_dflash import check_drafter_fits
from .tree_dflash import TokenTree
from .verification_dflash import Verifier

logger = logging.get_logger(__name__)

# From draft logits of shape (rows, slots, vocab_size) and anchors of shape (rows, 1) to the tree to verify.
TreeBuilder = Callable[[torch.Tensor, torch.LongTensor], TokenTree]

_ROUNDS_AFTER_FAULT = 8
_MAX_FAULTS = 3


@torch.no_grad()
def decode(
    drafter: PreTrainedModel,
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    *,
    token_streamer: BaseStreamer | None = None,
    sample_drafts: bool = False,
    tree_builder: TreeBuilder | None = None,
    num_tree_nodes: int | str | None = None,
    draft_window: int | None = None,
    **model_kwargs,
) -> DFlashGenerateOutput | torch.LongTensor:
    """What plain `generate` of the target returns, decoded with a drafter; called by `generate` with prepared inputs.

    Greedy ids equal plain ones in float32. Sampled ids equal those that plain `generate` draws from the same seed,
    except with `sample_drafts`, where only the distribution is the same.

    Args:
        drafter ([`DFlashDraftModel`]): The drafter.
        model ([`PreTrainedModel`]): The target.
        input_ids (`torch.LongTensor`): Prompts, padded on the left, shape (rows, tokens).
        logits_processor ([`LogitsProcessorList`]), stopping_criteria ([`StoppingCriteriaList`]), generation_config
            ([`GenerationConfig`]), synced_gpus (`bool`), streamer ([`BaseStreamer`], *optional*): As `generate`
            prepares them for its decoding methods. `num_assistant_tokens` fixes the number of proposals to verify;
            without it, it follows from measured times and acceptance.
        token_streamer ([`BaseStreamer`], *optional*): A streamer under a name that `generate(custom_generate=...)`
            passes on: it keeps `streamer` to itself.
        sample_drafts (`bool`): Draw proposals from the drafter's distribution and keep them by the rule of
            speculative sampling, instead of proposing its most likely tokens.
        tree_builder (`Callable`, *optional*): Makes a tree of proposals from the draft logits; default: a chain of the
            most likely tokens.
        num_tree_nodes (`int` or `"auto"`, *optional*), draft_window (`int`, *optional*): See [`CallOptions`]; default:
            those of the generation config.
        model_kwargs: The target's other inputs, and its cache.
    Raises:
        ValueError: If drafter and target do not fit, or the call has something that drafting cannot keep exact; the
            text says what. Nothing has been generated then.
    """
    num_rows = input_ids.shape[0]
    if sample_drafts and tree_builder is not None:
        raise ValueError("`sample_drafts` draws a chain of proposals; leave out `tree_builder`, or `sample_drafts`.")
    options = CallOptions.of_call(generation_config, num_tree_nodes=num_tree_nodes, draft_window=draft_window)
    if options.num_tree_nodes and (sample_drafts or tree_builder is not None):
        other = "sample_drafts" if sample_drafts else "tree_builder"
        raise ValueError(
            f"`num_tree_nodes` is {options.num_tree_nodes!r}, but `{other}` makes proposals of its own; leave one out."
        )
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
        streamer = token_streamer
    reason = _why_undrafted(num_rows, logits_processor, generation_config, synced_gpus)
    if reason is not None:
        logger.warning_once(f"{reason}, so this call is decoded without its drafter.")
        return model._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
        )
    if num_rows > 1 and streamer is not None:
        raise ValueError(f"A streamer takes one row, but the batch has {num_rows}. Stream one prompt at a time.")
    call = DecodeCall(
        drafter,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        model_kwargs,
        sample_drafts=sample_drafts and bool(generation_config.do_sample),
        tree_builder=tree_builder,
        options=options,
    )
    with call.verifier.taps:
        return call.run()


def _why_undrafted(
    num_rows: int, processors: LogitsProcessorList, config: GenerationConfig, synced_gpus: bool
) -> str | None:
    """Why a call is decoded plainly although nothing is wrong with it; None if it can be drafted for."""
    if synced_gpus:
        return "Its ranks must run the same number of forwards (`synced_gpus`)"
    if num_rows > 1 and counts_its_calls(processors):
        return "Guidance and SynthID watermarks of several rows need one call per token"
    if num_rows > 1 and config.output_attentions:
        return "Attention weights of several rows were asked for"
    return None


class DecodeCall:
    """One decoding call. "Row" is a row of the given batch; rows that have ended leave `rows` where they can."""

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
        *,
        sample_drafts: bool,
        tree_builder: TreeBuilder | None,
        options: CallOptions,
    ):
        if config.num_beams is not None and config.num_beams > 1:
            raise ValueError(
                f"`num_beams` is {config.num_beams}, but a drafter works with greedy search and sampling."
            )
        check_drafter_fits(drafter.config, target)
        self.drafter, self.target = drafter, target
        self.config, self.streamer = config, streamer
        self.sample_drafts, self.tree_builder = sample_drafts, tree_builder
        num_rows, num_prompt = input_ids.shape
        block_size = drafter.config.block_size
        self.rows = list(range(num_rows))
        self.text = CommittedText(input_ids, criteria, config.max_length, num_scratch=block_size)
        self.verifier = Verifier(
            target,
            drafter.config.target_layer_ids,
            config,
            model_kwargs,
            num_rows=num_rows,
            num_prompt=num_prompt,
            max_length=self.text.max_length,
            block_size=block_size,
            num_tree_nodes=options.num_tree_nodes,
        )
        self.block_drafter = self._make_block_drafter(options.draft_window)
        self.policy = RoundPolicy(
            target,
            drafter,
            config,
            num_rows,
            num_tree_nodes=options.num_tree_nodes,
            # Drawn proposals take part in the draw, so a length that follows the clock would make seeds useless.
            verifies_whole_block=sample_drafts or tree_builder is not None,
            sizes=self.verifier.sizes,
        )
        self.recorder = OutputRecorder(config, num_rows)
        self.keeps_cache = self.verifier.is_cache_given or self.recorder.is_dict
        self.acceptance = Acceptance(self.text, processors, self.recorder, draws_after_drafts=sample_drafts)
        self.draft_processors = draft_processors(processors, keep_argmax=not sample_drafts)
        self.accepted_lengths: list[list[int]] = [[] for _ in self.rows]
        self.num_faults = self.num_rounds_to_skip = self.num_draft_rounds = 0
        self.has_accepted = False

    def run(self) -> DFlashGenerateOutput | torch.LongTensor:
        self._read_prompt()
        while self.rows:
            start = time.perf_counter()
            tree, draft_scores = self._propose()
            outputs = self.verifier.verify(tree)
            paths = self.acceptance.accept(self.rows, tree, outputs.logits, draft_scores)
            choices = [
                self.text.new_tokens[row][-len(path) :] if path else []
                for row, path in zip(self.rows, paths, strict=True)
            ]
            self._settle(tree, outputs, paths)
            del outputs
            is_warming_up = self.verifier.is_warming_up or (tree.num_nodes > 1 and self.block_drafter.is_warming_up)
            seconds = None if is_warming_up else time.perf_counter() - start
            self.policy.record(tree.num_nodes - 1, choices, seconds, len(self.rows))
        self.policy.keep()
        return self._result()

    def _make_block_drafter(self, draft_window: int | None) -> BlockDrafter | StaticBlockDrafter:
        arguments = self.drafter, self.target, self.verifier.num_unseen, draft_window
        max_columns = self.verifier.cache.max_columns
        if self.verifier.is_fast and max_columns is not None and can_be_static(self.drafter, self.target):
            options = compile_options(self.target, self.config)
            return StaticBlockDrafter(*arguments, max_context=max_columns, options=options)
        return BlockDrafter(*arguments)

    def _read_prompt(self) -> None:
        outputs = self.verifier.read_prompt(self.text.up_to(self.text.num_prompt), self.block_drafter.max_context)
        if self.policy.tree_budget is not None and not self.verifier.takes_trees:
            self.policy.refuse_trees()
            logger.warning_once(
                f"{type(self.target).__name__} with this cache and attention cannot take the mask of a tree: "
                "proposals are chains, whatever `num_tree_nodes` says."
            )
        try:
            self.block_drafter.add_features(*self.verifier.prompt_features())
        except RuntimeError as error:
            self._turn_drafter_off(error)
        self.recorder.add_prefill(outputs)
        if self.config.do_sample and not self.sample_drafts:
            self.acceptance.noise = StepNoise(len(self.rows), outputs.logits.shape[-1], self.text.device)
        # The last prompt token is the root of a tree without proposals.
        root = TokenTree.chain(self.text.ids.new_zeros(len(self.rows), 1))
        self._stream(self.acceptance.accept(self.rows, root, outputs.logits[:, -1:], None))
        self._drop_ended_rows()

    # Proposing

    def _propose(self) -> tuple[TokenTree, torch.Tensor | None]:
        """What to verify, and the scores that proposals were drawn from, if they were drawn."""
        anchors = self.text.last_tokens(self.rows)
        num_proposals = self._num_proposals()
        if num_proposals < 1:
            return TokenTree.chain(anchors), None
        try:
            if self.tree_builder is not None:
                logits = self.block_drafter.logits(anchors, self.drafter.config.block_size - 1)
                tree, scores = self._allowed_tree(self.tree_builder(logits, anchors), num_proposals), None
            elif self.policy.tree_budget is not None:
                tree, scores = self._grow_tree(self.block_drafter.logits(anchors, num_proposals)), None
            else:
                logits = self.block_drafter.logits(anchors, num_proposals)
                proposals, scores = self._choose_proposals(logits)
                tree = TokenTree.chain(torch.cat([anchors, proposals], dim=1))
        except Exception as error:  # whatever fails in the drafter, the target can go on
            self.num_faults += 1
            self.num_rounds_to_skip = _ROUNDS_AFTER_FAULT
            if self.num_faults == 1:
                logger.warning(f"The drafter failed; this answer goes on without it for a while: {error!r}")
            return TokenTree.chain(anchors), None
        self.num_draft_rounds += 1
        return tree, scores

    def _num_proposals(self) -> int:
        if self.num_faults >= _MAX_FAULTS:
            return 0
        if self.num_rounds_to_skip > 0:
            self.num_rounds_to_skip -= 1
            return 0
        room = max(self.text.max_length - self.text.length(row) - 1 for row in self.rows)
        most_nodes = self._most_nodes()
        if most_nodes is not None:
            room = min(room, most_nodes)
        return min(room, self.policy.pick()) if room > 0 else 0

    def _most_nodes(self) -> int | None:
        """Nodes beside the anchor that a static cache has room for; None without a limit."""
        num_free_columns = self.verifier.cache.num_free_columns
        return None if num_free_columns is None else num_free_columns - 1

    def _choose_proposals(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Proposals of shape (rows, slots), and the scores that they were drawn from, if they were drawn."""
        if not self.sample_drafts and not self.draft_processors:
            return logits.max(dim=-1).indices, None  # argmax() is four times slower on a CPU in bfloat16
        logits = logits.float()
        proposals, all_scores = [], []
        for slot in range(logits.shape[1]):
            # Each slot may depend on those before it, so they are written behind the text for a while.
            lengths = {i: self.text.length(row) + slot for i, row in enumerate(self.rows)}
            processed = process(self.draft_processors, self.text, self.rows, lengths, dict(enumerate(logits[:, slot])))
            scores = torch.stack(list(processed.values()))
            tokens = scores.softmax(-1).multinomial(1)[:, 0] if self.sample_drafts else scores.argmax(-1)
            self.text.ids[self.rows, list(lengths.values())] = tokens
            proposals.append(tokens)
            all_scores.append(scores)
        return torch.stack(proposals, dim=1), torch.stack(all_scores, dim=1) if self.sample_drafts else None

    def _grow_tree(self, logits: torch.Tensor) -> TokenTree:
        # A processor that looks at the text would need a call for each node.
        processors = LogitsProcessorList(each for each in self.draft_processors if is_prefix_free([each]))
        if processors:
            no_text = self.text.ids.new_zeros(logits.shape[0] * logits.shape[1], 1)
            logits = processors(no_text, logits.float().flatten(0, 1)).view(logits.shape)
        anchors = [self.text.new_tokens[row][-1] for row in self.rows]
        is_over = [self.text.is_over(row) for row in self.rows]
        return self.policy.grow(logits, anchors, is_over, self._most_nodes())

    def _allowed_tree(self, tree: TokenTree, num_proposals: int) -> TokenTree:
        most_nodes = self._most_nodes()
        if not tree.is_chain and self.verifier.takes_trees:
            if most_nodes is None or tree.num_nodes - 1 <= most_nodes:
                return tree
        elif not tree.is_chain:
            logger.warning_once(
                f"{type(self.target).__name__} with this cache and attention cannot take the mask of a tree: each "
                "tree is cut to its longest path."
            )
        # A static cache has no columns behind the longest text.
        return tree.longest_chain(num_proposals + 1)

    # After a round

    def _settle(self, tree: TokenTree, outputs: Any, paths: list[list[int]]) -> None:
        try:
            self.block_drafter.add_features(self.verifier.block_features(paths), [len(path) for path in paths])
        except RuntimeError as error:
            self._turn_drafter_off(error)
        self.recorder.add_block(outputs, tree.num_nodes, paths, self.rows, self.verifier.cache.cache)
        for row, path in zip(self.rows, paths, strict=True):
            if path:
                self.accepted_lengths[row].append(len(path))
        self.has_accepted |= any(len(path) > 1 for path in paths)
        self._sound_alarm()
        self._stream(paths)
        if self.keeps_cache or not all(self.text.is_over(row) for row in self.rows):
            self.verifier.keep_nodes(tree, paths)
        self._drop_ended_rows()

    def _drop_ended_rows(self) -> None:
        staying = [i for i, row in enumerate(self.rows) if not self.text.is_over(row)]
        cache = self.verifier.cache
        if not staying:
            self.rows = []
        elif len(staying) < len(self.rows) and cache.is_static:
            cache.forget_rows([i for i in range(len(self.rows)) if i not in staying])
        elif len(staying) < len(self.rows) and not self.keeps_cache:
            assert isinstance(self.block_drafter, BlockDrafter)  # static caches keep their rows
            self.verifier.select_rows(staying)
            self.block_drafter.select_rows(staying)
            self.rows = [self.rows[i] for i in staying]
        if self.acceptance.noise is not None:
            unfinished = [row for row in self.rows if not self.text.is_over(row)]
            self.acceptance.noise.forget_before({row: len(self.text.new_tokens[row]) for row in unfinished})

    def _stream(self, paths: list[list[int]]) -> None:
        if self.streamer is not None:
            self.streamer.put(torch.tensor([self.text.new_tokens[0][-len(paths[0]) :]]))

    def _turn_drafter_off(self, error: RuntimeError) -> None:
        if self.num_faults < _MAX_FAULTS:
            self.num_faults = _MAX_FAULTS
            logger.warning(f"The drafter is off in this call: {error}")

    def _sound_alarm(self) -> None:
        if self.num_draft_rounds == ROUNDS_BEFORE_ALARM and not self.has_accepted:
            self.num_draft_rounds += 1  # once a call
            warn_of_useless_drafter()

    def _result(self) -> DFlashGenerateOutput | torch.LongTensor:
        if self.streamer is not None:
            self.streamer.end()
        if self.acceptance.noise is not None:
            self.acceptance.noise.rewind(self.text.num_steps)
        pad_token = getattr(self.config, "_pad_token_tensor", None)
        pad_id = 0 if pad_token is None else int(pad_token)
        cache = None
        if self.keeps_cache:
            self.verifier.cache.stop_recording()
            is_whole = len(set(self.text.num_new)) == 1 and not self.verifier.cache.has_forgotten_rows
            cache = self.verifier.cache.cache if is_whole else None
        return self.recorder.result(
            self.text.sequences(pad_id), self.text.num_new, pad_id, cache, self.accepted_lengths
        )
