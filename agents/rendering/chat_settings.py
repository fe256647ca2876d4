"""How a model is spoken to: its chat settings, saved beside its weights so that every run renders alike.

`complete_settings` fills in what the chat template decides (the dialect of tool calls, the role of observations) by
rendering short conversations; `open_renderer` then builds the renderer. `build_phrase_tokenizer` makes the tokenizer of
models that are small enough to train on a laptop.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from turngym.agents.rendering.chat_template import OBSERVATION, SYSTEM, USER, ChatTemplate, RenderError
from turngym.agents.rendering.conversation import Example, Memory
from turngym.agents.rendering.prompt_templates import NAMES, PromptTemplates, read_templates
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.skills import Skills
from turngym.agents.rendering.template_limits import TRUSTED
from turngym.envs.channels import ToolChannel, make_channel
from turngym.envs.core.errors import AgentError, TurngymError
from turngym.envs.core.files import FILE as SUMS
from turngym.envs.core.settings import from_table
from turngym.envs.core.task import ToolSpec, plain_id
from turngym.envs.dialects import DIALECTS, HERMES
from turngym.envs.tool_calls import CALL_ID, STYLES, Call, Dialect
from turngym.retrieval.user_files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "turngym.json"
VALUE = "turngymvalue"
THOUGHT = "turngymthought"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Everything about rendering that the weights depend on."""

    channel: str = "text"
    """`text` for <think> and <action> tags, `tool` for a function call as the chat template writes it. `tool:DIALECT`
    and `text:STYLE` (`turngym.envs.channels.make_channel`) name the form instead of reading it from the template."""
    system: str | None = None
    """The system message; by default the environment's instructions and the channel's; empty for none."""
    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of every observation after the first; `auto` takes the role for which the template keeps more history."""
    thinking: bool | None = None
    """`enable_thinking` of Qwen3-style templates; by default the template's own default."""
    history: Literal["template", "append"] = "template"
    """`append` keeps earlier thoughts even if the template would drop them, so an episode is one segment."""
    memory: str = "all"
    """What a turn's prompt holds of the episode: `all`, `window:N` (the task and the last N turns), `react` (a
    transcript), `verl-agent:N` (`prompts` with the last N turns). With all but the first every turn is a segment of its
    own."""
    prompts: tuple[str, str, str] | None = None
    """The templates of `verl-agent:N`: `alfworld`, `webshop` or `search`, the first turn's, and that of later ones."""
    max_new_tokens: int = 512
    """Most ids of one response."""
    max_context: int | None = None
    """Most ids of prompt and response together; by default what the model allows."""

    def __post_init__(self) -> None:
        self.remembers  # noqa: B018 refuses what cannot be meant

    @property
    def remembers(self) -> Memory:
        """`memory` with its templates."""
        if self.prompts is None:
            return Memory(self.memory)
        kind, first, later = self.prompts
        return Memory(self.memory, PromptTemplates(kind=kind, first=first, later=later))

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that a run's identity records; `memory` counts only if it is not `all`, `prompts` by hash."""
        values = asdict(self)
        if self.memory == "all":
            del values["memory"]
        del values["prompts"]
        templates = self.remembers.templates
        return values if templates is None else {**values, "prompts": templates.sha256[:16]}

    def memory_of(self, memory: str | None, prompts: str | None, env_id: str) -> dict[str, Any]:
        """The fields `memory` and `prompts` with what `--memory` and `--prompts` say; as they are for None.

        Raises AgentError for templates of another environment than `env_id`.
        """
        memory = memory or self.memory
        known = self.prompts if memory.startswith("verl-agent:") else None
        if prompts is not None:
            read = read_templates(prompts, env_id)
            known = read.kind, read.first, read.later
        elif known is not None and known[0] != NAMES.get(plain_id(env_id)):
            raise AgentError(f"the model's prompts are of {known[0]}, it plays {env_id}: give others (--prompts own)")
        return {"memory": memory, "prompts": known}

    def save(self, folder: str | Path) -> Path:
        """Write `turngym.json` into the model's folder."""
        path = Path(folder) / FILE
        # the folder's checksums were made with other settings and would no longer match
        (path.parent / SUMS).unlink(missing_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> ChatSettings:
        """Read `turngym.json` from the model's folder; the defaults if there is none.

        Raises TurngymError if the file is no JSON object, or has settings that do not exist or values that cannot be.
        """
        path = Path(folder) / FILE
        if not path.exists():
            return cls()
        try:
            values = json.loads(read_text(path, AgentError))
        except (ValueError, RecursionError) as error:
            raise AgentError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise AgentError(f"{path} is a {type(values).__name__}; it must be an object of settings")
        return from_table(cls, values, str(path))


# Which dialect of tool calls and thoughts a chat template writes, found by rendering.


def with_dialect(settings: ChatSettings, tokenizer: Any, tool: ToolSpec) -> ChatSettings:
    """`settings` with the channel that the tokenizer's chat template writes (`tool` becomes `tool:glm`).

    A channel that names its dialect (`tool:hermes`) stays as it is.

    Raises RenderError if the template knows no tools, or writes calls in a dialect that is not known here.
    """
    if settings.channel == "text":
        style = thought_style(tokenizer, tool)
        return replace(settings, channel=f"text:{style}") if style else settings
    if settings.channel != "tool":
        return settings
    dialect, exact = dialect_of_template(tokenizer, tool)
    if not exact:
        warnings.warn(
            f"this chat template's calls are read as {dialect.name}, but it writes them slightly differently "
            "from us: answers are read and kept as they were said, but demonstrations (sft, luffy) differ from it",
            stacklevel=2,
        )
    return settings if dialect is HERMES else replace(settings, channel=f"tool:{dialect.name}")


def dialect_of_template(tokenizer: Any, tool: ToolSpec) -> tuple[Dialect, bool]:
    """The dialect in which the chat template writes a call of `tool`: one rendering is compared with every known one.

    The second value says whether we write calls exactly as the template does; if not, we can only read them. Raises
    RenderError as `with_dialect` does.
    """
    template = ChatTemplate(tokenizer, tool=tool)
    written = list(_written_calls(template, tool))
    for text in written:
        exact = [d for d in DIALECTS.values() if d.write(tool.name, tool.argument, VALUE) in text]
        if exact:
            # the longest match, since bare JSON is part of many other dialects
            return max(exact, key=lambda dialect: len(dialect.write(tool.name, tool.argument, VALUE))), True
    for text in written:
        for dialect in DIALECTS.values():
            if _reads(dialect, text, tool):
                return dialect, False
    if written:
        raise RenderError(
            f"the chat template of {template.name!r} writes tool calls in a dialect that is not known here: "
            f"{written[0].strip()[:120]!r}; use the text channel (--channel text)"
        )
    raise RenderError(
        f"the chat template of {template.name!r} knows no tools: use the text channel (--channel text), or "
        "--channel tool:hermes for a model that was trained to call tools without its template's help"
    )


def thought_style(tokenizer: Any, tool: ToolSpec) -> str | None:
    """The style of thoughts (`turngym.envs.tool_calls.STYLES`) that the template names; None means `<think>`."""
    source = ChatTemplate(tokenizer).source
    for name, thoughts in STYLES.items():
        # harmony's template may assemble the text behind its marker elsewhere, so only the marker is looked for
        if thoughts.opening.rpartition("<|message|>")[0] in source if name == "harmony" else thoughts.opening in source:
            return name
    return None


def _written_calls(template: ChatTemplate, tool: ToolSpec) -> Iterator[str]:
    """What the template writes for an assistant message with a call, in the forms that templates accept."""
    opening = template.opening(SYSTEM, USER)
    before = template.render(opening, generate=False)
    argument = {tool.argument: VALUE}
    forms = product((CALL_ID, f"functions.{tool.name}:0"), (argument, json.dumps(argument)), ("", None))
    for id, arguments, content in forms:
        call = {"type": "function", "id": id, "function": {"name": tool.name, "arguments": arguments}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            text = template.render([*opening, message], generate=False)
        except RenderError:
            continue
        # the system message may show an example call, so the part that equals the bare opening is cut off
        same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        text = text[same:]
        if VALUE in text and tool.name in text:
            yield text


def _reads(dialect: Dialect, text: str, tool: ToolSpec) -> bool:
    start = dialect.find(text)
    call = dialect.read(text[start:]) if start >= 0 else None
    if not isinstance(call, Call) or call.name != tool.name or not isinstance(call.arguments, dict):
        return False
    return call.arguments.get(tool.argument) == VALUE


def open_renderer(
    tokenizer: Any,
    settings: ChatSettings,
    tool: ToolSpec,
    *,
    history: Literal["template", "append"] | None = None,
    stop_ids: Sequence[int] = (),
    examples: Sequence[Example] = (),
    skills: Skills | None = None,
) -> ChatRenderer:
    """The renderer of `settings`, which `complete_settings` has completed; `history` overrides theirs.

    Raises RenderError if the chat template cannot do what they ask.
    """
    channel: Any = make_channel(settings.channel, tool)
    called = isinstance(channel, ToolChannel)
    return ChatRenderer(
        tokenizer,
        tool=tool if called else None,
        thinking=settings.thinking,
        observation_role="user" if settings.observation_role == "auto" else settings.observation_role,
        history=history or settings.history,
        stop_ids=stop_ids,
        dialect=channel.dialect if called else None,
        thoughts=channel.dialect.thoughts if called else channel.thoughts,
        memory=settings.remembers,
        examples=examples,
        skills=skills,
    )


def renderer_of(
    model: Any,
    tokenizer: Any,
    settings: ChatSettings,
    tool: ToolSpec,
    examples: Sequence[Example] = (),
    skills: Skills | None = None,
) -> ChatRenderer:
    """The `ChatRenderer` that a model was trained with; its generation config may name further end tokens."""
    # transformers allows one id, a list of ids, or none
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or ()
    stop_ids = (more,) if isinstance(more, int) else tuple(more)
    return open_renderer(tokenizer, settings, tool, stop_ids=stop_ids, examples=examples, skills=skills)


def complete_settings(settings: ChatSettings, tokenizer: Any, tool: ToolSpec) -> ChatSettings:
    """`settings` with what the tokenizer's chat template decides: the dialect, and the role of observations.

    In the tool channel observations go into role `tool` if the template shows them there. In the text channel they are
    `user` messages, unless the template drops earlier thoughts for those and keeps them around tool results: role
    `tool` then keeps an episode one growing text instead of one prompt for each turn.

    Raises RenderError if the template knows no tools, writes unknown calls, or shows observations in no role.
    """
    settings = with_dialect(settings, tokenizer, tool)
    if settings.observation_role != "auto":
        return settings
    user, called = (_segments(replace(settings, observation_role=role), tokenizer, tool) for role in ("user", "tool"))
    prefers_tool = called is not None and (user is None or settings.channel.startswith("tool") or called < user)
    return replace(settings, observation_role="tool" if prefers_tool else "user")


def describe(settings: ChatSettings) -> str:
    """The resolved settings in one line for people."""
    thinking = {None: "as the template has it", True: "on", False: "off"}[settings.thinking]
    return (
        f"chat: channel {settings.channel}, observations as {settings.observation_role} messages, thinking {thinking}"
    )


def _segments(settings: ChatSettings, tokenizer: Any, tool: ToolSpec) -> int | None:
    """How many segments a short episode with thoughts needs; None if the template refuses it."""
    channel = make_channel(settings.channel, tool)
    action = tool.templates[0] if len(tool.tags) > 1 else "look"
    thought = None if settings.thinking is False else THOUGHT
    try:
        renderer = open_renderer(tokenizer, settings, tool)
        thread = renderer.open(SYSTEM, OBSERVATION)
        for _ in range(2):
            renderer.write(thread, renderer.template.fit(channel.format(action, thought)))
            renderer.observe(thread, OBSERVATION)
    except RenderError:
        return None
    # the channel cannot express the environment's example action
    except TurngymError:
        return 1
    return len(thread.segments)


END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""One role token before and one end token after each message: two tokens of overhead, and append-only."""
TRUSTED.add(CHAT_TEMPLATE)


def build_phrase_tokenizer(phrases: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that spends one token on each of `phrases` and falls back to bytes for any other text.

    Every piece costs the same in the underlying unigram model, so the segmentation with the fewest tokens wins.
    `decode(encode(text)) == text` for any text that does not spell out a byte token (`<0x41>`).
    The order of `phrases` does not matter; the ids depend on the set alone.

    Raises TurngymError without phrases, or where a phrase collides with a special token.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(set(phrases) - {""})
    clashes = [piece for piece in pieces if piece in (PAD, END, *ROLES)]
    if not pieces or clashes:
        raise TurngymError(f"a phrase tokenizer needs phrases that are not special tokens; got {clashes or 'none'}")
    special = [PAD, END, *ROLES]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    # Unigram charges an unknown character 10 more than the worst piece; at -100, phrases always win over bytes
    scored = [(piece, -1.0) for piece in special + pieces] + [(piece, -100.0) for piece in byte_pieces]
    # Unigram needs an unk id to get past unknown text; with byte_fallback the id itself never appears
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=len(scored) - 256, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(ROLES),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
