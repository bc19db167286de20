"""Weights in and out: PyTorch's names by tables of rules, our own names in safetensors files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.weights import decoder_only, encoder_decoder, gpt2, rules, torch_transformer
from flax_transformer.weights.files import load_safetensors, save_safetensors
from flax_transformer.weights.torch_files import read_torch_file
from flax_transformer.weights.transfer import Cast, Table, export, load

__all__ = [
    "Table",
    "load_safetensors",
    "load_torch",
    "read_torch_file",
    "rules",
    "save_safetensors",
    "table_for",
    "to_torch",
    "torch_transformer",
]


def load_torch(
    model: nnx.Module, state_dict: Mapping[str, Any], *, table: Table | None = None, cast: Cast = "exact"
) -> None:
    """Fill ``model`` from a PyTorch ``state_dict()``, strictly.

    Every key is consumed once (further names of a shared tensor must hold equal values, the position buffer ``pe`` is
    copied) and every parameter is filled once, or nothing is loaded.

    Args:
        state_dict: PyTorch tensors, or arrays of NumPy or JAX, by name.
        table: how the names correspond, see ``table_for``; another model's table may be given.
        cast: ``exact`` refuses a change of dtype that loses bits, ``round`` rounds.
    Raises:
        ValueError: one, listing every problem with names and shapes.
    """
    load(model, state_dict, (table or table_for(model)).rules, cast=cast)


def to_torch(model: nnx.Module, *, table: Table | None = None) -> dict[str, np.ndarray]:
    """The inverse of ``load_torch``, bit for bit: every key of the PyTorch module's ``state_dict()``, as NumPy arrays.

    ``module.load_state_dict({k: torch.from_numpy(v) for k, v in to_torch(model).items()})``
    """
    return export(model, (table or table_for(model)).rules)


def table_for(model: nnx.Module) -> Table:
    """The foreign names that a model has by default.

    An ``EncoderDecoder`` has the encoder-decoder document's; a ``DecoderOnly`` the decoder-only document's where they
    suffice (one block, one norm), and GPT-2's otherwise.
    """
    match model:
        case EncoderDecoder():
            return encoder_decoder.table(model)
        case DecoderOnly() if decoder_only.fits(model.config):
            return decoder_only.table(model)
        case DecoderOnly():
            return gpt2.table(model)
    raise ValueError(
        f"no table of weights is known for {type(model).__name__}; write one (weights/rules.py) and pass table="
    )
