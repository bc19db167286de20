"""The walk through the decoder-only document: `python -m torch_reference.decoder_only`."""

import argparse
import sys
from pathlib import Path

import torch

from torch_reference.decoder_only import DecoderOnly, even_features, position_column, sample_batch, split_tokens
from torch_reference.walks import documentation_text, heading, show


def walk(text: str, token_ids: list[int], *, seed: int) -> None:
    """Prints, section by section, what the script prints, for `text` that tokenizes to `token_ids`."""
    heading("3. Vocabulary and tokens")
    print(f"text[:7]:           {text[:7]!r}")
    print(f"tokenized_txt[:7]:  {token_ids[:7]}")
    print(f"max(tokenized_txt): {max(token_ids)}")
    tokenized_txt = torch.tensor(token_ids, dtype=torch.long)
    train_txt, _ = split_tokens(tokenized_txt)

    heading("4. Samples")
    torch.manual_seed(seed)
    x_batch, y_batch = sample_batch(train_txt, batch_size=4, context_len=16)
    print(x_batch)
    show("x_batch", x_batch)

    heading("5. Embedding")
    model = DecoderOnly(vocab_size=max(token_ids) + 1)
    print(f"vocabulary size: {model.embeddings.num_embeddings}")
    print(f"embedding width: {model.embeddings.embedding_dim}")
    show("embeddings.weight", model.embeddings.weight)
    show("x_batch_embedding", model.embeddings(x_batch))
    show("y_batch_embedding", model.embeddings(y_batch))

    heading("6. Positions")
    show("position_embedding", model.position_embedding)
    show("position", position_column(16))
    show("i", even_features(64))
    X = model.input_embedding(x_batch)
    print("final input embedding of the first token of x, the first and last five of its 64 numbers:")
    numbers = [f"{number:.6f}" for number in X[0, 0].tolist()]
    print(*numbers[:5], "...", *numbers[-5:])

    heading("7. Transformer block")
    attention = model.attend(X)
    print("scores of head 0 after the mask:")
    for row in attention.masked_scores[0, 0].tolist():
        print(" ".join(f"{score:6.3f}" for score in row))
    show("out, the attention weights", attention.weights)
    show("value", attention.value)
    show("A", attention.A)
    show("A, heads merged", attention.merged)

    heading("8. Multi-head attention, line by line: to 8.8, the output layer")
    with torch.no_grad():
        probabilities = model(x_batch)
    sizes = " x ".join(map(str, probabilities.shape))
    print(f"the script prints nothing more; it ends with {sizes} probabilities, the largest {probabilities.max():.2e},")
    print(f"each row summing to 1 within {(probabilities.sum(-1) - 1).abs().max():.1e}")


def read_text(path: Path) -> str:
    """The text of `path`, UTF-8, line ends as the script's `open(..., "r")` reads them; ValueError if it has none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8 first") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a readable UTF-8 text file") from error


def tokenize(text: str, *, source: str) -> list[int]:
    """The o200k_base ids of `text`; ValueError naming `source` if they are too few to sample a window of 16 from.

    The script's `encode` refuses a text in which `<|endoftext|>` is written out; here that is text like any other.
    """
    try:
        from flax_transformer.tokenizer import encode_ordinary
    except ImportError as error:
        raise ValueError(
            f"tokenizing needs the package flax_transformer and what it depends on, but importing it failed ({error}); "
            "install this project with pip"
        ) from error
    token_ids = encode_ordinary(text).tolist()
    if int(0.9 * len(token_ids)) <= 16:
        raise ValueError(
            f"{source} has {len(token_ids)} tokens, too few: 90 % of them must be more than 16; give a longer text"
        )
    return token_ids


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and walks; returns the exit code, 2 after one line of error."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_reference.decoder_only",
        description="Walk through the decoder-only document on real text: every number, shape and table that its "
        "script prints, in its order, under its section headings.",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of batch and weights (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="UTF-8 text to walk on (default: CPython's own documentation)"
    )
    arguments = parser.parse_args(argv)
    try:
        text = documentation_text() if arguments.data is None else read_text(arguments.data)
        token_ids = tokenize(text, source="the documentation" if arguments.data is None else str(arguments.data))
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    walk(text, token_ids, seed=arguments.seed)
    return 0
