"""PyTorch's own layers: ``torch.nn.Transformer``, post-norm as in the paper and pre-norm, and a GPT-style stack."""

import functools
import math

import numpy as np
from flax import nnx

import flax_transformer as ft
from flax_transformer import masks, weights
from flax_transformer.decoding import translate_greedy
from flax_transformer.layers import sinusoidal_table
from parity_tests.cases import Case

D, F, N, L, V = 20, 28, 5, 2, 13
LENGTH = 16
DROPOUT = 0.1
START_ID, DECODED_LENGTH = 1, 9


def _encoder_decoder(*, norm_first):
    import torch

    class Model(torch.nn.Module):
        """Embeddings scaled by sqrt(D), sinusoidal positions, one table for source, target and output."""

        def __init__(self):
            super().__init__()
            layer = functools.partial(
                dict, d_model=D, nhead=N, dim_feedforward=F, dropout=DROPOUT, batch_first=True, norm_first=norm_first,
                layer_norm_eps=1e-6,
            )  # fmt: skip
            self.embedding = torch.nn.Embedding(V, D)
            self.dropout = torch.nn.Dropout(DROPOUT)
            norms = [torch.nn.LayerNorm(D, eps=1e-6) if norm_first else None for _ in range(2)]
            self.transformer = torch.nn.Transformer(
                d_model=D,
                nhead=N,
                batch_first=True,
                # The paper has no norm at the end of a stack, and nn.Transformer always has one of its own.
                custom_encoder=torch.nn.TransformerEncoder(
                    torch.nn.TransformerEncoderLayer(**layer()), L, norm=norms[0], enable_nested_tensor=False
                ),
                custom_decoder=torch.nn.TransformerDecoder(
                    torch.nn.TransformerDecoderLayer(**layer()), L, norm=norms[1]
                ),
            )
            self.output = torch.nn.Linear(D, V, bias=False)
            self.output.weight = self.embedding.weight
            table = torch.from_numpy(np.array(sinusoidal_table(LENGTH, D, formula="pow")))
            self.source_table = torch.nn.Buffer(table)
            self.target_table = torch.nn.Buffer(table.clone())

        def forward(self, source, target):
            hidden = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
            # The two calls that nn.Transformer's forward makes, so that dropout is drawn for the encoder first.
            memory = self.transformer.encoder(
                self.dropout(self.embedding(source) * math.sqrt(D) + self.source_table[: source.shape[1]]),
                src_key_padding_mask=source == 0,
            )
            features = self.transformer.decoder(
                self.dropout(self.embedding(target) * math.sqrt(D) + self.target_table[: target.shape[1]]),
                memory,
                tgt_mask=hidden,
                tgt_key_padding_mask=target == 0,
                memory_key_padding_mask=source == 0,
            )
            return self.output(features)

    return Model()


def _gpt():
    import torch

    class Model(torch.nn.Module):
        """Learned positions, pre-norm layers with the exact GELU, a causal mask, a tied output."""

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(V, D)
            self.positions = torch.nn.Parameter(0.5 * torch.randn(LENGTH, D))
            self.dropout = torch.nn.Dropout(DROPOUT)
            layer = torch.nn.TransformerEncoderLayer(
                D, N, F, DROPOUT, activation="gelu", batch_first=True, norm_first=True
            )
            self.stack = torch.nn.TransformerEncoder(layer, L, norm=torch.nn.LayerNorm(D), enable_nested_tensor=False)
            self.output = torch.nn.Linear(D, V, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, ids):
            x = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
            hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
            return self.output(self.stack(x, mask=hidden))

    return Model()


def _pairs(rng):
    """Padding of unequal lengths; PyTorch's rows that see nothing are another story (zeros or NaN), so there are none."""
    source, target, labels = (rng.integers(1, V, (3, length)) for length in (9, 7, 7))
    source[0, -2:] = source[1, -5:] = 0
    target[2, -3:] = labels[2, -3:] = 0
    return {name: ids.astype(np.int32) for name, ids in (("source", source), ("target", target), ("labels", labels))}


def _pair_masks(source, target):
    causal = masks.causal_mask(target.shape[1])
    return masks.padding_mask(source), masks.combine_masks(masks.padding_mask(target), causal)


def _reference_pair_masks(inputs):
    """What is hidden from whom, as ``forward`` above says it to PyTorch, turned round."""
    import torch

    source, target = inputs["source"], inputs["target"]
    seen = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
    return {"source": (source != 0)[:, None, None], "target": (target != 0)[:, None, None] & seen}


def _translate(module, source, target, labels):
    import torch

    del target, labels
    decoded = torch.full((len(source), 1), START_ID)
    with torch.no_grad():
        for _ in range(DECODED_LENGTH - 1):
            decoded = torch.cat([decoded, module.eval()(source, decoded)[:, -1:].argmax(-1)], dim=1)
    return decoded


def _pair_config(dtype, *, norm_first):
    position = dict(norm_position="pre", final_norm="stack_end") if norm_first else {}
    return ft.EncoderDecoderConfig.paper_base(
        vocab_size=V,
        d_model=D,
        d_ff=F,
        num_heads=N,
        num_layers=L,
        max_length=LENGTH,
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
        activation_dropout=DROPOUT,
        projection_bias="with",
        mask_fill="minus_inf",
        param_dtype=dtype,
        compute_dtype=dtype,
        **position,
    )


def _pair_table(model):
    table = weights.torch_transformer.table(
        model,
        stack="transformer",
        embeddings={"embedding": "source_embedding"},
        positions={"source_table": "source_positions", "target_table": "target_positions"},
        output="output",
    )
    return _without_embedding(table)


def _without_embedding(table):
    """PyTorch's embedding gives rows, ours rows times sqrt(D); the positions' dropout compares their sum."""
    return weights.Table(
        modules={theirs: ours for theirs, ours in table.modules.items() if theirs != "embedding"}, rules=table.rules
    )


def _case(name, *, norm_first):
    return Case(
        name=name,
        size="small",
        reference=functools.partial(_encoder_decoder, norm_first=norm_first),
        config=functools.partial(_pair_config, norm_first=norm_first),
        model=lambda config: ft.EncoderDecoder(config, rngs=nnx.Rngs(0)),
        inputs=_pairs,
        call_reference=lambda module, source, target, labels: {"logits": module(source, target)},
        call_model=lambda model, source, target, labels, dropout=None: {
            "logits": model(source, target, *_pair_masks(source, target), dropout=dropout)
        },
        logits="output",
        label_smoothing=0.1,
        padding_id=0,
        table=_pair_table,
        reference_masks=_reference_pair_masks,
        model_masks=lambda inputs: dict(
            zip(("source", "target"), _pair_masks(inputs["source"], inputs["target"]), strict=True)
        ),
        # Untrained, a pre-norm model with a tied output repeats the token that it was given, which proves nothing.
        decode_reference=None if norm_first else _translate,
        decode_model=lambda model, source, target, labels: translate_greedy(
            model, source, masks.padding_mask(source), start_id=START_ID, length=DECODED_LENGTH
        ),
    )


def _ids(rng):
    ids = rng.integers(0, V, (2, 3, 11)).astype(np.int32)
    return {"ids": ids[0], "labels": ids[1]}


def _gpt_config(dtype):
    return ft.DecoderOnlyConfig(
        vocab_size=V,
        d_model=D,
        d_ff=F,
        num_heads=N,
        num_layers=L,
        max_length=LENGTH,
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
        activation_dropout=DROPOUT,
        mask_fill="minus_inf",
        param_dtype=dtype,
        compute_dtype=dtype,
    )


def _seen(inputs):
    import torch

    length = inputs["ids"].shape[1]
    return {"causal": torch.ones(length, length, dtype=torch.bool).tril()[None, None]}


CASES = (
    _case("torch_transformer_post_norm", norm_first=False),
    _case("torch_transformer_pre_norm", norm_first=True),
    Case(
        name="torch_gpt",
        size="small",
        reference=_gpt,
        config=_gpt_config,
        model=lambda config: ft.DecoderOnly(config, rngs=nnx.Rngs(0)),
        inputs=_ids,
        call_reference=lambda module, ids, labels: {"logits": module(ids)},
        call_model=lambda model, ids, labels, dropout=None: {"logits": model(ids, dropout=dropout)},
        logits="output",
        table=lambda model: weights.torch_transformer.table(
            model,
            stack="stack",
            embeddings={"embedding": "embedding"},
            positions={"positions": "positions"},
            output="output",
        ),
        reference_masks=_seen,
        model_masks=lambda inputs: {"causal": masks.causal_mask(inputs["ids"].shape[1])},
    ),
)
