"""Walks through the two documents, and what both share: headings, shapes, and real English text without a download."""

import torch


def documentation_text() -> str:
    """CPython's own language reference as text: the topics in the order of their keys, joined by a blank line.

    Source: the standard library's `pydoc_data.topics`, which `help("assert")` prints from. Its length depends on the
    Python version (about 465,000 characters on Python 3.11).
    """
    from pydoc_data.topics import topics  # 700 kB of source: only a walk pays for it

    return "\n\n".join(topics[key] for key in sorted(topics))


def heading(section: str) -> None:
    """Prints `section` so that it stands out, as the document's own heading does."""
    print(f"\n{section}\n{'-' * len(section)}")


def show(name: str, tensor: torch.Tensor) -> None:
    """Prints one shape the way the documents print it, behind the name of the expression that has it."""
    print(f"{name + ':':<32} {tensor.shape}")
