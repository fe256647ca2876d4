"""What a judge model is told: one response, what came next, and what to decide with that hindsight."""

from __future__ import annotations

from turngym.envs.protocols import JudgeRequest

LIMIT = 6000
"""Characters of each part that are shown; the middle of longer ones is left out."""

SCORE = """You judge one reply of an assistant by what happened right after it.
You see what the assistant had in front of it, its reply, and the message that came next. The next message is either \
from the user or the result of a tool that the assistant called.
- A tool result is there because the assistant acted. That it exists says nothing; what it says does.
- 1: the next message shows that the reply moved the task forward: the action worked, new facts came in, the user \
goes on or is content.
- -1: it shows that the reply failed: an error, a refused or useless action, the same state as before, or a user who \
asks to redo, correct or rephrase it.
- 0: it does not tell. A user who merely changes or extends the request is not unhappy with the reply.
Reason in a few sentences, then end with \\boxed{1}, \\boxed{-1} or \\boxed{0}."""

HINT = """You look back at one reply of an assistant, knowing what happened right after it.
You see what the assistant had in front of it, its reply, and the message that came next: a user's message, or the \
result of a tool that the assistant called (the result is there because the assistant acted).
Does the next message teach something that would have made the reply better, had the assistant known it?
- If so, write it as a hint to the assistant, one to three sentences, concrete, without quoting the next message: \
[HINT_START]your hint[HINT_END], and end with \\boxed{1}.
- If not (the reply was fine, or the next message says nothing about it), end with \\boxed{-1}."""


def messages(request: JudgeRequest) -> tuple[str, str]:
    """(system message, user message) of the judge for `request`."""
    speaker = "result of the assistant's action (role tool)" if request.next_role == "tool" else "next message"
    if request.next_role not in ("tool", "user"):
        speaker = f"next message (role {request.next_role})"
    parts = [("what the assistant had in front of it", request.before), ("reply", request.response)]
    parts.append((speaker, request.next_state))
    shown = "\n\n".join(f"## {title}\n{_short(text)}" for title, text in parts if text or title != parts[0][0])
    return (SCORE if request.kind == "score" else HINT), shown


def _short(text: str) -> str:
    if len(text) <= LIMIT:
        return text
    half = LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
