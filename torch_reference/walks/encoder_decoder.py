"""The walk through the encoder-decoder document: `python -m torch_reference.encoder_decoder`."""

import argparse
import re
from typing import Any

import torch
import torch.nn as nn

from torch_reference.encoder_decoder import (
    Generator,
    LayerNorm,
    autoregressive_infer,
    create_pad_mask,
    make_standard_transformer,
    subsequent_mask,
)
from torch_reference.walks import documentation_text, heading, show


def real_sentences(count):
    """The first `count` sentences of 6 to 11 plain words in CPython's documentation, no two of one length."""
    text = " ".join(documentation_text().split())
    sentences: list[list[str]] = []
    for match in re.finditer(r"(?<=\. )[A-Z][a-z]*(?: [a-z]+){5,10}(?=\.)", text):
        words = match.group().split()
        if len(words) not in map(len, sentences):
            sentences.append(words)
        if len(sentences) == count:
            break
    return sentences


def ids_of(sentences, words):
    """Sentences as rows of ids, B S: 0 pads the shorter rows, a word is its place in `words`."""
    length = max(map(len, sentences))
    return torch.tensor([[words.index(word) for word in row] + [0] * (length - len(row)) for row in sentences])


def attention_in(model, name) -> Any:
    """The attention of a model under its dotted name; `Any`, since type checkers cannot follow lists of modules."""
    return model.get_submodule(name)


def walk():
    """Prints, section by section, what the document shows, on four sentences of English."""
    first, second, third, fourth = real_sentences(4)
    src_words = ["<pad>", *sorted({*first, *second})]
    tgt_words = ["<pad>", "<start>", *sorted({*third, *fourth})]
    src = ids_of([first, second], src_words)
    tgt = ids_of([["<start>", *third], ["<start>", *fourth]], tgt_words)
    print("Source sentences, words as tokens:", " ".join(first), " ".join(second), sep="\n  ")
    print("Target sentences, which stand in for translations:", " ".join(third), " ".join(fourth), sep="\n  ")

    heading("1.4 The output layer")
    generator = Generator(512, len(tgt_words))
    show("decoder features", features := torch.randn(*tgt.shape, 512))
    show("generator(features)", generator(features))

    heading("2. One way to make masks")
    src_mask = create_pad_mask(src)
    tgt_mask = create_pad_mask(tgt) * subsequent_mask(tgt.size(1))
    show("src", src)
    show("src_mask", src_mask)
    show("create_pad_mask(tgt)", create_pad_mask(tgt))
    show("subsequent_mask(tgt.size(1))", subsequent_mask(tgt.size(1)))
    show("tgt_mask, their product", tgt_mask)
    print("tgt_mask[1], 1 = may attend:")
    print("\n".join("  " + " ".join(f"{cell:.0f}" for cell in row) for row in tgt_mask[1].tolist()))

    heading("3. The complete Transformer")
    model = make_standard_transformer(len(src_words), len(tgt_words)).eval()
    print(attention_in(model, "encoder.layers.0.self_attn"))
    print("(4 linears are listed, and they are one: clones copies nothing)")

    heading("4. From token ids to probabilities")
    with torch.no_grad():
        show("src", src)
        show("src_embed(src)", model.src_embed(src))
        show("encode(src, src_mask)", memory := model.encode(src, src_mask))
        show("encoder attention weights", attention_in(model, "encoder.layers.5.self_attn").attn)
        show("tgt", tgt)
        show("tgt_embed(tgt)", model.tgt_embed(tgt))
        show("decode(tgt, memory, ...)", out := model.decode(tgt, memory, src_mask, tgt_mask))
        show("decoder self-attention weights", attention_in(model, "decoder.layers.5.self_attn").attn)
        show("attention to the memory", attention_in(model, "decoder.layers.5.src_attn").attn)
        show("generator(out)", model.generator(out))
        show("model(src, tgt, ...)", probabilities := model(src, tgt, src_mask, tgt_mask))
    print(f"every row of probabilities sums to 1 within {(probabilities.sum(-1) - 1).abs().max():.1e}")

    heading("5. Autoregressive inference (weights are random: the words mean nothing)")
    ids = autoregressive_infer(model, src[:1], src_mask[:1], max_len=8, start_idx=1)
    show("autoregressive_infer(...)", ids)
    print(" ".join(tgt_words[token] for token in ids[0].tolist()))

    heading("6. What the document claims, and what its code does")
    for claim, fact in claims_and_facts():
        print(f"- {claim}\n    {fact}")


def claims_and_facts():
    """Section 6: pairs of a claim of the document and what its code, run here, does instead."""
    model = make_standard_transformer(100, 120, dropout=0.0)
    distinct = sum(parameter.numel() for parameter in model.parameters())
    listed = sum(value.numel() for key, value in model.state_dict().items() if not key.endswith("pe"))
    one_layer = sum(parameter.numel() for parameter in make_standard_transformer(100, 120, N=1).parameters())
    row = torch.randn(1, 512)
    norm_difference = (LayerNorm(512)(row) - nn.LayerNorm(512)(row)).abs().max()
    attention = attention_in(model, "encoder.layers.0.self_attn").eval()
    attention(*torch.randn(3, 1, 5, 512), mask=torch.zeros(1, 5, 5))
    return [
        (
            "N = 6 layers stacked in encoder and decoder",
            f"one layer applied 6 times: make_standard_transformer(100, 120) has {distinct:,} parameters, "
            f"{one_layer:,} with N=1; without any sharing they would be {listed:,}",
        ),
        (
            "projections for queries, keys, values and the output",
            f"{len(set(attention.linears))} Linear stands for all {len(attention.linears)}",
        ),
        ("post-norm as in the paper", "norm(x + dropout(sublayer(norm(x)))): the same norm before and after"),
        (
            "layer normalisation",
            f"std over n - 1, eps outside the root: differs from torch.nn.LayerNorm by {norm_difference:.1e} on a row",
        ),
        (
            "a masked position is shut out",
            f"in a fully masked row each of 5 positions has weight {attention.attn[0, 0, 0, 0]:.3f}",
        ),
        (
            "dropout is a parameter of the model",
            f"with dropout=0.0 attention still drops out with p = {attention.dropout.p}",
        ),
    ]


def main(argv=None):
    """Parses the command line and walks."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_reference.encoder_decoder",
        description="Walk through the encoder-decoder document on four real sentences: its sections in its order, "
        "the shape of everything from token ids to probabilities, greedy inference, and its claims beside the facts.",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)")
    torch.manual_seed(parser.parse_args(argv).seed)
    walk()
