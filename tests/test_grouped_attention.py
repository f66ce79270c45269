import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny_target

from dflash_hf.trainer.grouped_attention import grouped_attention, register_grouped_attention


def stock_attention(query, key, value, mask, scaling):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)


@pytest.mark.parametrize("query_length", [1, 2, 7])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("scaling", [None, 0.2])
def test_grouped_attention_equals_stock_sdpa_with_a_padding_mask(query_length, heads, key_heads, scaling):
    query = torch.randn(3, heads, query_length, 8, dtype=torch.float64)
    key, value = torch.randn(2, 3, key_heads, 9, 8, dtype=torch.float64)
    mask = torch.ones(query_length, 9, dtype=torch.bool).tril(9 - query_length).expand(3, 1, -1, -1).clone()
    mask[1, ..., :2] = False
    # Transformers may hand over a mask that is longer than the cache.
    longer_mask = F.pad(mask, (0, 4), value=True)
    expected = stock_attention(query, key, value, mask, scaling)
    output, _ = grouped_attention(None, query, key, value, longer_mask, scaling=scaling)
    assert output.shape == (3, query_length, heads, 8)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("query_length", [1, 5, 9])
def test_no_mask_means_causal(query_length):
    query = torch.randn(2, 4, query_length, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 9, 8, dtype=torch.float64)
    mask = torch.ones(query_length, 9, dtype=torch.bool).tril(9 - query_length)
    output, _ = grouped_attention(None, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(output, stock_attention(query, key, value, mask, 0.3), rtol=1e-10, atol=1e-10)


def test_generate_gives_the_same_tokens_as_with_stock_sdpa():
    stock, grouped = make_tiny_target(), make_tiny_target()
    stock.set_attn_implementation("sdpa")
    grouped.set_attn_implementation(register_grouped_attention())
    assert grouped.config._attn_implementation != stock.config._attn_implementation
    input_ids = torch.randint(4, 96, (4, 9))
    attention_mask = torch.ones_like(input_ids)
    for row, padding in enumerate((0, 3, 8, 1)):
        input_ids[row, :padding], attention_mask[row, :padding] = 1, 0
    options = {"attention_mask": attention_mask, "max_new_tokens": 20, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected, output = stock.generate(input_ids, **options), grouped.generate(input_ids, **options)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
