"""Keep secrets out of what is shown of a playbook's own commands, by their names and their forms.

The same rules as the host's `fleetfix/remote/masking.py`, which also knows the values.
"""

from __future__ import annotations

import re

MASK = "***"

NAME = (
    r"[A-Za-z0-9_.-]*?(?:KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?<![A-Za-z0-9])PASS)"
)
VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s'";&|]+)"""
ASSIGNED = re.compile(rf"""(?<![A-Za-z0-9_.-])(-{{0,2}}{NAME}["']?)(\s*[=:]\s*){VALUE}""", re.I)
OPTION = re.compile(rf"(?<!\S)(--?{NAME})(\s+)(?!-){VALUE}", re.I)
IN_URL = re.compile(r"(://[^/\s:@]*:)[^@/\s]+@")
BEARER = re.compile(r"\b(Bearer\s+)\S+", re.I)
KNOWN = re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|sk-|AKIA)[A-Za-z0-9_-]{12,}")


def masked(text: str) -> str:
    """A text without what looks like a secret in it: `WANDB_API_KEY=***`, `--token ***`."""
    text = ASSIGNED.sub(rf"\1\2{MASK}", text)
    text = OPTION.sub(rf"\1\2{MASK}", text)
    text = IN_URL.sub(rf"\1{MASK}@", text)
    return KNOWN.sub(MASK, BEARER.sub(rf"\1{MASK}", text))
