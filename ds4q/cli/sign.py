"""Owns ``ds4q sign``: options in, a signature out. Signing itself is ``registry/signing.py``."""

from __future__ import annotations

from pathlib import Path

import click

from ds4q.cli import common


@click.command("sign")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.hfq")
@click.option(
    "--key",
    required=True,
    type=click.Path(path_type=Path),
    metavar="KEY.pem",
    help="Private key: an elliptic curve key (P-256) in PEM, without a password.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the signature goes; else FILE.hfq.sig.",
)
@click.option("--force", is_flag=True, help="Replace an existing signature.")
@common.json_option
@common.talk_options
def command(
    file: Path,
    key: Path,
    output: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Sign an artifact and its receipt with a key of yours (needs ds4q[sign]).

    Example: ds4q sign flash.hfq --key mine.pem

    The digests are those of the receipt, so no payload is read: verify the artifact first. Others
    check the signature with ds4q verify --public-key, or with model_signing verify.
    """
    from ds4q.registry.signing import is_signature, sign, signature_path

    out = signature_path(file) if output is None else output
    if out.exists() and not force:
        what = f"{str(out)!r} exists; replace it with --force"
        raise click.BadParameter(what, param_hint="--output")
    common.claim_report(out, "--output", is_signature)
    digests = sign(file, key, out)
    if as_json:
        common.emit_json({"signature": str(out), "files": digests})
    else:
        common.line(f"wrote {out}: {', '.join(digests)}")
