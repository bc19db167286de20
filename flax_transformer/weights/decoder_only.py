"""The decoder-only document's names (``torch_reference.decoder_only.DecoderOnly``) for our ``DecoderOnly``."""

from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.weights.rules import Rule, buffer, copy, transpose
from flax_transformer.weights.transfer import Table

MODULES = {
    "embeddings": "embedding",
    "Wq": "blocks.0.attention.query",
    "Wk": "blocks.0.attention.key",
    "Wv": "blocks.0.attention.value",
    "Wo": "blocks.0.attention.output",
    "layer_norm": "blocks.0.attention_residual.norm",
    "ffn": "blocks.0.feed_forward",
    "ffn.0": "blocks.0.feed_forward.up",
    "ffn.2": "blocks.0.feed_forward.down",
    "output": "output",
}
LINEARS = ("Wq", "Wk", "Wv", "Wo", "ffn.0", "ffn.2")


def fits(config: DecoderOnlyConfig) -> bool:
    """Whether the document has a name for every tensor of such a model, and no other."""
    return (
        config.num_layers == 1
        and config.sharing == "document"
        and config.final_norm == "none"
        and config.embedding_tying == "none"
        and config.projection_bias == config.output_bias == "with"
        and config.position_table != "learned"
    )


def table(model: DecoderOnly) -> Table:
    """The table for a model whose configuration ``fits``.

    The document's position table is no entry of its ``state_dict()``. Add it as ``position_embedding`` to load it too,
    which makes the two models equal in the table's last bits:
    ``load_torch(model, {**reference.state_dict(), "position_embedding": position_embedding(16, 64)})``.
    """
    del model  # one shape only
    rules: list[Rule] = [copy("embeddings.weight", "embedding.embedding")]
    for theirs in LINEARS:
        rules.append(transpose(f"{theirs}.weight", f"{MODULES[theirs]}.kernel"))
        rules.append(copy(f"{theirs}.bias", f"{MODULES[theirs]}.bias"))
    norm = MODULES["layer_norm"]
    rules += [copy("layer_norm.weight", f"{norm}.scale"), copy("layer_norm.bias", f"{norm}.bias")]
    rules += [copy("output.weight", "output.kernel"), copy("output.bias", "output.bias")]
    rules.append(buffer("position_embedding", "positions.table", optional=True))
    return Table(modules=MODULES, rules=tuple(rules))
