"""The PyTorch code of two tutorials, exactly as they have it, mistakes included.

`torch_reference.encoder_decoder` is the encoder-decoder document, `torch_reference.decoder_only` the decoder-only
document. Nothing here takes an option that the documents do not have; README.md beside this file lists what the
code computes where the documents' prose says otherwise.
"""
