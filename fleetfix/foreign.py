"""Words that people bring from other tools, and what says the same here."""

from __future__ import annotations

STEP_WORDS: dict[str, str] = {
    "when": "an action plans nothing where nothing is to be done; when_changed and when_pending tie steps",
    "loop": "give the action a list; over hosts the rollout goes by itself",
    "register": "an action reads the facts it needs by its own probe; nothing is passed by name",
    "serial": "write policy: {canary: 1, batch: [10%, 25%]} at the top of the playbook",
    "become": "write become: true for the host in the inventory; a shell step runs as whom as_user: names",
    "until": "write within:, every: and consecutive: to wait for a check",
    "notify": "let the later step say when_changed: [this step's id]",
    "rescue": "write on_failure: rollback; every change carries its own undo",
    "ignore_errors": "write on_failure: continue",
    "changed_when": "a shell step has check:, which says whether there is anything to do",
    "delegate_to": "a step runs on its own host; what concerns another host is a playbook for that host",
    "async": "write timeout:; a step holds no other host up",
    "environment": "write env: inside the shell or command step",
    "no_log": "give a secret by --secret; it is never shown",
    "tags": "make a playbook of the steps you want to run alone",
    "vars": "vars stand at the top of the playbook",
    "tasks": "write steps:",
}
_SAME = {
    "loop": ("with_items", "with_list", "with_dict", "loop_control", "for_each"),
    "serial": ("strategy", "throttle", "max_fail_percentage", "any_errors_fatal", "run_once", "order"),
    "become": ("become_user", "become_method", "sudo", "remote_user"),
    "until": ("wait_for", "retry"),
    "notify": ("handlers", "listen"),
    "rescue": ("block", "always", "undo", "rollback"),
    "changed_when": ("failed_when", "creates", "removes", "check_mode"),
    "delegate_to": ("delegate_facts", "local_action", "connection"),
    "async": ("poll",),
    "vars": ("vars_files", "vars_prompt", "set_fact"),
    "tasks": ("pre_tasks", "post_tasks", "roles", "include_tasks", "import_tasks", "import_playbook"),
    "when": ("if", "unless", "only_if", "gather_facts"),
}
FILE_WORDS: dict[str, str] = {
    "hosts": "choose hosts on the command line: --hosts 'gpu[01-16]'; in a step hosts: narrows them",
}
"""Words that mean something else in a step."""
STEP_WORDS |= {other: STEP_WORDS[word] for word, others in _SAME.items() for other in others}

ANSIBLE_FILE = (
    "this is a list, as Ansible has it: here a playbook is one mapping of name, vars, policy and steps"
)


def answer(word: str) -> str | None:
    """What says the same here, or None for a word we do not know."""
    said = STEP_WORDS.get(word) or FILE_WORDS.get(word)
    return f"{word!r} is not a word of this language: {said}" if said else None
