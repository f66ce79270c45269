"""What the tests of `dflash-regenerate` share: a chat template that continues, and rows by their ids."""

from pathlib import Path

from tiny_material import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dflash_hf.trainer.data import read_json_lines


def make_chat_tokenizer(
    end_token: str = "<eos>", *, think: str = "", rewrite: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer whose template renders a later chat as a continuation of the earlier one.

    Args:
        end_token: Ends the assistant's turns.
        think: Template text behind the generation prompt, not rendered in earlier turns.
        rewrite: Render earlier answers as `w79`, as templates do that drop thoughts.
    """
    tokenizer = make_tokenizer()
    tokenizer.eos_token = end_token
    content = "'w79' if message['role'] == 'assistant' else message['content']" if rewrite else "message['content']"
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %} {{ message['role'] }} {{ " + content + " }}"
        "{% if message['role'] == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} assistant " + think + "{% endif %}"
    )
    return tokenizer


def save_chat_target(source: str | Path, folder: str | Path, **template) -> str:
    """Copies the target in `source` to `folder`, with the tokenizer of [`make_chat_tokenizer`]."""
    target = AutoModelForCausalLM.from_pretrained(source)
    target.save_pretrained(folder)
    end_token = make_tokenizer().convert_ids_to_tokens(target.generation_config.eos_token_id)
    make_chat_tokenizer(end_token, **template).save_pretrained(folder)
    return str(folder)


def rows_by_id(path: str | Path) -> dict[str, dict]:
    rows = list(read_json_lines(path))
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}
