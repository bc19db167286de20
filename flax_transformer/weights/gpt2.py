"""GPT-2's published names (``GPT2LMHeadModel.state_dict()`` of Hugging Face transformers) for our ``DecoderOnly``.

Its projections are ``Conv1D``: weights are (in, out) already, and query, key and value are one matrix side by side.
"""

from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.layers import Buffer, Identity
from flax_transformer.weights.rules import Rule, buffer, copy, split
from flax_transformer.weights.transfer import Table, mark_aliases


def table(model: DecoderOnly) -> Table:
    """The table for ``model``, whatever its options: what the model lacks, such as a bias, has no row.

    A sinusoidal position table may be given under GPT-2's ``wpe`` key, and need not be.
    """
    config = model.config
    rules: list[Rule] = [copy("transformer.wte.weight", "embedding.embedding")]
    modules = {"transformer.wte": "embedding", "lm_head": "output"}
    if isinstance(model.positions.table, Buffer):
        rules.append(buffer("transformer.wpe.weight", "positions.table", optional=True))
    else:
        rules.append(copy("transformer.wpe.weight", "positions.table"))
    for index in range(config.num_layers):
        theirs, ours = f"transformer.h.{index}", f"blocks.{index}"
        modules[theirs] = ours
        qkv = [f"{ours}.attention.{name}" for name in ("query", "key", "value")]
        rules.append(split(f"{theirs}.attn.c_attn.weight", [f"{path}.kernel" for path in qkv], axis=1))
        if config.projection_bias == "with":
            rules.append(split(f"{theirs}.attn.c_attn.bias", [f"{path}.bias" for path in qkv], axis=0))
        linears = {"attn.c_proj": "attention.output", "mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down"}
        for their_linear, our_linear in linears.items():
            modules[f"{theirs}.{their_linear}"] = f"{ours}.{our_linear}"
            rules.append(copy(f"{theirs}.{their_linear}.weight", f"{ours}.{our_linear}.kernel"))
            if our_linear != "attention.output" or config.projection_bias == "with":
                rules.append(copy(f"{theirs}.{their_linear}.bias", f"{ours}.{our_linear}.bias"))
        for their_module, our_module in (("attn", "attention"), ("mlp", "feed_forward")):
            modules[f"{theirs}.{their_module}"] = f"{ours}.{our_module}"
        for their_norm, our_norm in (("ln_1", "attention_residual.norm"), ("ln_2", "feed_forward_residual.norm")):
            modules[f"{theirs}.{their_norm}"] = f"{ours}.{our_norm}"
            rules += _norm_rules(f"{theirs}.{their_norm}", f"{ours}.{our_norm}")
    if not isinstance(model.norm, Identity):
        modules["transformer.ln_f"] = "norm"
        rules += _norm_rules("transformer.ln_f", "norm")
    rules.append(copy("lm_head.weight", "output.kernel"))
    if config.output_bias == "with":
        rules.append(copy("lm_head.bias", "output.bias"))
    return Table(modules=modules, rules=mark_aliases(model, rules))


def _norm_rules(theirs: str, ours: str) -> list[Rule]:
    return [copy(f"{theirs}.weight", f"{ours}.scale"), copy(f"{theirs}.bias", f"{ours}.bias")]
