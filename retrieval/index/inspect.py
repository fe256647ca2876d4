"""An index folder in words."""

from __future__ import annotations

from turngym.retrieval.index.manifest import IndexManifest


def describe_index(manifest: IndexManifest) -> list[list[str]]:
    """Rows of (what, value) for people: kind, corpus, encoder, settings, sizes on disk."""
    rows = [
        ["kind", manifest.kind],
        ["passages", f"{manifest.passages:,}"],
        ["corpus sha256", manifest.corpus_sha256],
    ]
    if manifest.encoder is not None:
        record = manifest.encoder
        rows += [["encoder", record.model or record.kind], ["encoder fingerprint", record.fingerprint]]
        rows += [[name.replace("_", " "), repr(value)] for name, value in sorted((record.style or {}).items())]
        rows += [["dimensions", str(record.dim)]]
    if manifest.faiss is not None:
        settings = ", ".join(f"{name}={value:g}" for name, value in sorted(manifest.faiss.parameters.items()))
        rows += [["faiss index", manifest.faiss.factory], ["search settings", settings or "none"]]
        rows += [["metric", manifest.faiss.metric]]
    sizes: dict[str, int] = {}
    for name, record_ in manifest.files.items():
        part = name.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + record_.bytes
    rows += [[f"{part} on disk", show_bytes(size)] for part, size in sorted(sizes.items())]
    rows += [["total on disk", show_bytes(sum(sizes.values()))], ["fingerprint", manifest.fingerprint]]
    return rows


def show_bytes(size: float) -> str:
    """1234567 -> 1.2 MB (powers of ten)."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB" if abs(size) < 1000 else f"{size / 1000:.2f} TB"
