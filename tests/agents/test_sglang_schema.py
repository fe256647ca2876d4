"""Client and fake server against SGLang's own schema, where its wheel is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
import sglang_schema as schemas

from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.policy import ServerPolicy, ServerScorer
from turngym.agents.servers.server_connection import seed_of
from turngym.agents.servers.sglang_dialect import SglangDialect
from turngym.core.protocols import GenerateRequest, Sampling

DIALECT = SglangDialect()
IDS = np.array([5, 6, 7, 8], np.int32)
pytestmark = pytest.mark.sglang  # its wheel is installed by that job alone


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemas.load_schema()


def test_requests_mean_to_the_server_what_they_mean_here(schema: Any) -> None:
    sampling = Sampling(temperature=0.85, max_new_tokens=9, stop_ids=(2, 3), stop_text=("</action>",))
    read = schema.GenerateRequest.from_json_value(
        DIALECT.generate_body(fake.draw_of(IDS, 7, (3, 1), sampling), "r", None)
    )
    assert read.rid == "r"
    assert read.input_ids == [5, 6, 7, 8]
    assert read.return_logprob is True
    params = read.sampling_params
    assert (params.max_new_tokens, params.temperature, params.sampling_seed) == (7, 0.85, seed_of((3, 1)))
    assert (params.stop_token_ids, params.stop) == ([2, 3], ["</action>"])
    assert (params.top_p, params.top_k, params.min_p, params.ignore_eos) == (1.0, -1, 0.0, False)
    ask = fake.score_of(IDS, 1, [2], top=5, chosen=np.array([[4, 9]]))
    read = schema.GenerateRequest.from_json_value(DIALECT.score_body(ask, "r", None))
    assert (read.logprob_start_len, read.top_logprobs_num, read.token_ids_logprob) == (1, 5, [4, 9])
    assert read.sampling_params.max_new_tokens == 0


def test_the_schema_refuses_what_servers_refuse(schema: Any) -> None:
    body = DIALECT.generate_body(fake.draw_of(IDS, 7), "r", None)
    body["sampling_params"]["max_tokens"] = 3
    with pytest.raises(schema.JsonContractError, match="unknown field `max_tokens`"):
        schema.GenerateRequest.from_json_value(body)


def test_answers_of_the_schema_are_read(schema: Any) -> None:
    meta = schema.GenerateMetaInfo(
        id="r",
        prompt_tokens=4,
        completion_tokens=2,
        finish_reason=schema.GenerateMetaInfo.from_json_value(
            {"finish_reason": {"type": "stop", "matched": 1}}
        ).finish_reason,
        output_token_logprobs=[
            schema.LogprobEntry(logprob=-0.5, token_id=3),
            schema.LogprobEntry(logprob=-1, token_id=1),
        ],
        weight_version="w2",
        weight_versions=[
            schema.WeightVersionSpan(version="w1", start=0, end=1),
            schema.WeightVersionSpan(version="w2", start=1, end=2),
        ],
    )
    answer = schema.GenerateResponse(text="", meta_info=meta, output_ids=[3, 1]).to_json_value()
    drawn = DIALECT.read_generation(answer, fake.draw_of(IDS, 4))
    assert drawn.ids.tolist() == [3, 1]
    assert drawn.logprobs.tolist() == [-0.5, -1.0]
    assert (drawn.finish, drawn.spans) == ("stop", (("w1", 0, 1), ("w2", 1, 2)))


def test_the_fake_server_speaks_as_the_schema_does(schema: Any) -> None:
    problems: list[str] = []
    check = schemas.checker(schema)

    def noted(what: str, value: Any) -> None:
        try:
            check(what, value)
        except Exception as error:
            problems.append(f"{what}: {error!r}")

    with fake.FakeServer(check=noted) as server:
        fleet = Fleet(urls=[server.url]).open()
        policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY)
        sampling = Sampling(max_new_tokens=6, stop_ids=(3,), stop_text=("zz",))
        policy.generate([GenerateRequest(session="a", prompt_ids=IDS, sampling=sampling, stream=(1,))])
        scorer = ServerScorer(fleet=fleet, vocabulary=fake.VOCABULARY)
        scorer.logprobs([IDS], [np.array([1, 3])])
        scorer.topk([IDS], [np.array([1, 3])], 4)
        scorer.gather([IDS], [np.array([1, 3])], [np.array([[1, 2], [3, 4]])])
        fleet.close()
        assert len(server.of("/generate")) == 4
    assert not problems
