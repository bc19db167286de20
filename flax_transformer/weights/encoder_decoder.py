"""The encoder-decoder document's names (``make_standard_transformer``) for our ``EncoderDecoder``."""

from collections.abc import Iterator

from flax import nnx

from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.layers import Embedding, LayerNorm, Linear, OutputProjection, Positions
from flax_transformer.weights.rules import Rule, buffer, copy, transpose
from flax_transformer.weights.transfer import Table, find, mark_aliases


def table(model: EncoderDecoder) -> Table:
    """The table for ``model``, whatever its options: what the model lacks, such as a final norm, has no row.

    With ``sharing="document"`` all but the first name of a shared tensor are aliases: 262 keys, 26 parameters.
    """
    modules = dict(_modules(model))
    rules = [rule for theirs, ours in modules.items() for rule in _tensor_rules(theirs, ours, find(model, ours))]
    return Table(modules=modules, rules=mark_aliases(model, rules))


def _tensor_rules(theirs: str, ours: str, module: nnx.Module) -> Iterator[Rule]:
    match module:
        case Linear():
            yield transpose(f"{theirs}.weight", f"{ours}.kernel")
            if module.bias is not None:
                yield copy(f"{theirs}.bias", f"{ours}.bias")
        case OutputProjection():
            yield copy(f"{theirs}.weight", f"{ours}.kernel")
            if module.bias is not None:
                yield copy(f"{theirs}.bias", f"{ours}.bias")
        case LayerNorm():
            yield copy(f"{theirs}.gamma", f"{ours}.scale")
            yield copy(f"{theirs}.beta", f"{ours}.bias")
        case Embedding():
            yield copy(f"{theirs}.lut.weight", f"{ours}.embedding")
        case Positions():
            yield buffer(f"{theirs}.pe", f"{ours}.table", leading_axes=1)


def _modules(model: EncoderDecoder) -> Iterator[tuple[str, str]]:
    yield from _stack_modules("encoder", model, ["self_attn"], ["self_attention"])
    yield from _stack_modules("decoder", model, ["self_attn", "src_attn"], ["self_attention", "cross_attention"])
    for theirs, ours in (("src_embed", "source"), ("tgt_embed", "target")):
        yield f"{theirs}.0", f"{ours}_embedding"
        yield f"{theirs}.1", f"{ours}_positions"
        yield f"{theirs}.1.dropout", f"{ours}_positions.dropout"
    yield "generator.proj", "output"


def _stack_modules(
    name: str, model: EncoderDecoder, their_attentions: list[str], our_attentions: list[str]
) -> Iterator[tuple[str, str]]:
    yield name, name
    for index in range(model.config.num_layers):
        layer = f"{name}.layers.{index}"
        yield layer, layer
        for theirs, ours in zip(their_attentions, our_attentions, strict=True):
            yield f"{layer}.{theirs}", f"{layer}.{ours}"
            for number, projection in enumerate(("query", "key", "value", "output")):
                yield f"{layer}.{theirs}.linears.{number}", f"{layer}.{ours}.{projection}"
            yield f"{layer}.{theirs}.dropout", f"{layer}.{ours}.dropout"
        yield f"{layer}.feed_forward", f"{layer}.feed_forward"
        yield f"{layer}.feed_forward.w1", f"{layer}.feed_forward.up"
        yield f"{layer}.feed_forward.dropout", f"{layer}.feed_forward.dropout"
        yield f"{layer}.feed_forward.w2", f"{layer}.feed_forward.down"
        for number, sublayer in enumerate([*our_attentions, "feed_forward"]):
            theirs, ours = f"{layer}.sublayer.{number}", f"{layer}.{sublayer}_residual"
            yield theirs, ours
            yield f"{theirs}.norm", f"{ours}.norm"
            yield f"{theirs}.dropout", f"{ours}.dropout"
    yield f"{name}.norm", f"{name}.norm"
