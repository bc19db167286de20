"""The names of ``torch.nn.Transformer`` and ``torch.nn.TransformerEncoder`` for our models.

PyTorch's stacks have neither embeddings, positions nor an output projection; every program adds its own, so the names of
those are arguments. Its attention keeps query, key and value in one matrix, ``in_proj_weight``.
"""

from collections.abc import Iterator, Mapping

from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.layers import Buffer, Identity
from flax_transformer.weights.rules import Rule, buffer, copy, split, transpose, transposed
from flax_transformer.weights.transfer import Table, find, mark_aliases

# Their sublayers in order, each with ours: attention modules with the norm and dropout of the same number around them.
ENCODER = {"self_attn": "self_attention"}
DECODER = {"self_attn": "self_attention", "multihead_attn": "cross_attention"}
GPT = {"self_attn": "attention"}


def table(
    model: EncoderDecoder | DecoderOnly,
    *,
    stack: str,
    embeddings: Mapping[str, str],
    positions: Mapping[str, str],
    output: str,
) -> Table:
    """The table for a model of separate layers with biases in all projections, as PyTorch's layers have.

    Args:
        stack: their path of the ``nn.Transformer``, or for a ``DecoderOnly`` of the ``nn.TransformerEncoder``.
        embeddings: their path of each ``nn.Embedding`` -> ours ("source_embedding", "target_embedding", "embedding").
        positions: their name of each position table, of shape (length, D) -> our module that adds it ("positions", ...).
        output: their path of the ``nn.Linear`` onto the vocabulary.
    """
    modules: dict[str, str] = {output: "output"}
    rules: list[Rule] = []
    for theirs, ours in embeddings.items():
        modules[theirs] = ours
        rules.append(copy(f"{theirs}.weight", f"{ours}.embedding"))
    for theirs, ours in positions.items():
        fixed = isinstance(find(model, f"{ours}.table"), Buffer)
        rules.append((buffer if fixed else copy)(theirs, f"{ours}.table"))
    if isinstance(model, EncoderDecoder):
        stacks = [
            (f"{stack}.encoder", "encoder", "layers", ENCODER),
            (f"{stack}.decoder", "decoder", "layers", DECODER),
        ]
    else:
        stacks = [(stack, "", "blocks", GPT)]
    for theirs, ours, layers, attentions in stacks:
        prefix = f"{ours}." if ours else ""
        if ours:
            modules[theirs] = ours
        for index in range(model.config.num_layers):
            their_layer, our_layer = f"{theirs}.layers.{index}", f"{prefix}{layers}.{index}"
            modules |= {their_layer: our_layer, **_layer_modules(their_layer, our_layer, attentions)}
            rules += _layer_rules(their_layer, our_layer, attentions)
        if not isinstance(find(model, f"{prefix}norm"), Identity):
            modules[f"{theirs}.norm"] = f"{prefix}norm"
            rules += _norm_rules(f"{theirs}.norm", f"{prefix}norm")
    rules.append(copy(f"{output}.weight", "output.kernel"))
    if model.config.output_bias == "with":
        rules.append(copy(f"{output}.bias", "output.bias"))
    return Table(modules=modules, rules=mark_aliases(model, rules))


def _layer_modules(theirs: str, ours: str, attentions: Mapping[str, str]) -> dict[str, str]:
    modules = {f"{theirs}.{name}": f"{ours}.{attention}" for name, attention in attentions.items()}
    for number, sublayer in enumerate([*attentions.values(), "feed_forward"], start=1):
        modules[f"{theirs}.norm{number}"] = f"{ours}.{sublayer}_residual.norm"
        modules[f"{theirs}.dropout{number}"] = f"{ours}.{sublayer}_residual.dropout"
    for name, linear in (("linear1", "up"), ("dropout", "dropout"), ("linear2", "down")):
        modules[f"{theirs}.{name}"] = f"{ours}.feed_forward.{linear}"
    return modules


def _layer_rules(theirs: str, ours: str, attentions: Mapping[str, str]) -> Iterator[Rule]:
    for name, attention in attentions.items():
        parts = [f"{ours}.{attention}.{part}" for part in ("query", "key", "value")]
        fused = f"{theirs}.{name}.in_proj"
        yield split(f"{fused}_weight", [f"{part}.kernel" for part in parts], axis=0, then=transposed)
        yield split(f"{fused}_bias", [f"{part}.bias" for part in parts], axis=0)
        yield from _linear_rules(f"{theirs}.{name}.out_proj", f"{ours}.{attention}.output")
    for name, linear in (("linear1", "up"), ("linear2", "down")):
        yield from _linear_rules(f"{theirs}.{name}", f"{ours}.feed_forward.{linear}")
    for number, sublayer in enumerate([*attentions.values(), "feed_forward"], start=1):
        yield from _norm_rules(f"{theirs}.norm{number}", f"{ours}.{sublayer}_residual.norm")


def _linear_rules(theirs: str, ours: str) -> list[Rule]:
    return [transpose(f"{theirs}.weight", f"{ours}.kernel"), copy(f"{theirs}.bias", f"{ours}.bias")]


def _norm_rules(theirs: str, ours: str) -> list[Rule]:
    return [copy(f"{theirs}.weight", f"{ours}.scale"), copy(f"{theirs}.bias", f"{ours}.bias")]
