"""Writes the CPU stack's two models, `tiny` and `mid`; runs in the stack's own environment, without network.

Both are plain Llamas with random weights and share a tokenizer trained on the spot, so what they say means nothing.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = (
    "A claim about serving hardware is a test.",
    "The quick brown fox jumps over the lazy dog.",
    "Hello world, how many tokens fit into the memory of this machine?",
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: any text can be encoded, whatever it was trained on."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, **SPECIAL_TOKENS)


def llama(**shape: int) -> LlamaConfig:
    """Return the configuration of a bf16 Llama of this shape, with the tokenizer's ids."""
    ids = {name.replace("_token", "_token_id"): number for number, name in enumerate(SPECIAL_TOKENS)}
    ids.pop("unk_token_id")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **ids,
        **shape,
    )


def make_tiny(folder: Path) -> None:
    """Write 140 thousand random weights, the same ones every time (0.3 MB)."""
    torch.manual_seed(0)
    config = llama(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def make_mid(folder: Path) -> None:
    """Write a configuration without weights, for `--load-format dummy`.

    252,740,608 parameters, 0.471 GiB in bf16; one token of KV cache takes 32 KiB. Large enough to be seen in a memory
    table that is printed to two digits, small enough for any machine.
    """
    llama(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8
    ).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write tiny/ and mid/")
    folder = parser.parse_args().folder
    make_tiny(folder / "tiny")
    make_mid(folder / "mid")
