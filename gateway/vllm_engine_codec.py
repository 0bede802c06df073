"""vllm.grpc.engine's messages in the words that all front ends share.

The messages are those of the package smg-grpc-proto (Apache-2.0), whose vllm_engine.proto says what
each field means. What is set there and not served here is refused by name.
"""

from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2

from core.errors import InvalidRequest, Unsupported
from gateway import constraints
from gateway.inputs import CompletionInput, GrammarInput, SamplingInput

# The package has no types.
pb: Any = vllm_engine_pb2

# Without presence: zero means that nothing was asked for.
_PLAIN = (
    *("top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "n"),
)
_OPTIONAL = ("temperature", "max_tokens", "seed", "logprobs", "prompt_logprobs")
_OTHERS = {"stop", "stop_token_ids", "ignore_eos", "logit_bias"}
_CONSTRAINTS = {"json_schema", "json_object", "regex", "grammar", "choice"}
# They say how ids become text, or where a grammar starts, and text and grammars are the router's.
_NOT_FOR_TOKENS = {
    *("skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "grammar_from_first_token"),
}
_SAMPLING = {*_PLAIN, *_OPTIONAL, *_OTHERS, *_CONSTRAINTS, *_NOT_FOR_TOKENS}
_REQUEST = {"request_id", "tokenized", "text", "sampling_params", "stream"}


def completion_input(request: Any, *, model: str) -> CompletionInput:
    """A prompt to continue, by the model that there is: the protocol names none.

    Raises Unsupported for what is set and not served, InvalidRequest where there is no prompt.
    """
    _refuse_others(request, _REQUEST, "")
    if request.WhichOneof("input") is None:
        raise InvalidRequest("must hold `tokenized` or `text`", field="input")
    tokenized = request.WhichOneof("input") == "tokenized"
    return CompletionInput(
        model=model,
        prompt=tuple(request.tokenized.input_ids) if tokenized else request.text,
        sampling=_sampling(request.sampling_params),
        grammar=_grammar(request.sampling_params),
    )


def _sampling(params: Any) -> SamplingInput:
    _refuse_others(params, _SAMPLING, "sampling_params.")
    asked = {name: value for name in _PLAIN if (value := getattr(params, name))}
    asked |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    return SamplingInput(
        **asked,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=tuple(params.logit_bias.items()),
    )


def _grammar(params: Any) -> GrammarInput | None:
    kind = params.WhichOneof("constraint")
    field = f"sampling_params.{kind}"
    match kind:
        case "json_schema":
            return constraints.of_schema_text(params.json_schema, field)
        case "json_object" if params.json_object:
            return constraints.any_object(field)
        case "regex":
            return constraints.of_regex(params.regex, field)
        case "grammar":
            return constraints.of_grammar(params.grammar, field)
        case "choice":
            return constraints.of_choice(params.choice.choices, field)
    return None


def _refuse_others(message: Message, served: set[str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name not in served:
            raise Unsupported("is not served", field=f"{path}{field.name}")
