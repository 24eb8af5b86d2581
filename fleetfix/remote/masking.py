"""Keep secrets out of what leaves the host: in command lines, and in the last lines of logs.

By their names (`WANDB_API_KEY=…`, `--token …`), by their well-known forms (`hf_…`), and by the values
that the secret-looking variables of a job's environment have. `fleetfix/domain/masking.py` knows the
same names.
"""

import re

MASK = "***"
SHORTEST = 6  # characters of a value that is looked for: shorter ones are words that stand anywhere

NAME = (
    r"[A-Za-z0-9_.-]*?(?:KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?<![A-Za-z0-9])PASS)"
)
VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s'";&|]+)"""
ASSIGNED = re.compile(r"""(?<![A-Za-z0-9_.-])(-{0,2}%s["']?)(\s*[=:]\s*)%s""" % (NAME, VALUE), re.I)
OPTION = re.compile(r"(?<!\S)(--?%s)(\s+)(?!-)%s" % (NAME, VALUE), re.I)
OPTION_WORD = re.compile(r"^--?%s$" % NAME, re.I)
VARIABLE = re.compile(r"^%s$" % NAME, re.I)
IN_URL = re.compile(r"(://[^/\s:@]*:)[^@/\s]+@")
BEARER = re.compile(r"\b(Bearer\s+)\S+", re.I)
KNOWN = re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|sk-|AKIA)[A-Za-z0-9_-]{12,}")


def values_of(environ):
    """The values of the secret-looking variables of an environment, the longest first."""
    found = {value for name, value in (environ or {}).items() if VARIABLE.match(name)}
    return sorted((one for one in found if len(one) >= SHORTEST), key=len, reverse=True)


def masked(text, values=()):
    """A text without the secrets in it: `values`, and what looks like one."""
    for value in values:
        text = text.replace(value, MASK)
    text = ASSIGNED.sub(lambda match: match.group(1) + match.group(2) + MASK, text)
    text = OPTION.sub(lambda match: match.group(1) + match.group(2) + MASK, text)
    text = IN_URL.sub(lambda match: match.group(1) + MASK + "@", text)
    return KNOWN.sub(MASK, BEARER.sub(lambda match: match.group(1) + MASK, text))


def masked_argv(argv, values=()):
    """A command line without the secrets in it; a word after `--token` is one."""
    words, secret = [], False
    for word in argv:
        words.append(MASK if secret and not word.startswith("-") else masked(word, values))
        secret = bool(OPTION_WORD.match(word))
    return words
