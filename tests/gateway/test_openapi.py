"""The OpenAPI document, and what generated requests make of it: no answer is a server error that it does not
announce."""

import asyncio
import warnings

import pytest
import schemathesis
from headway_core.contract import header_names
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


async def test_the_document_describes_every_route(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    document = (await gateway.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/status.json"} <= set(
        document["paths"]
    )
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = document["paths"][path]["post"]
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
        assert header_names.SHED_REASON in operation["responses"]["429"]["headers"]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
async def test_generated_requests_never_meet_a_server_error(start_gateway, stub_runtime, mode):
    gateway = await start_gateway(stub_runtime())
    document = (await gateway.get("/openapi.json")).json()
    loop = asyncio.get_running_loop()

    def send_all():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            operations = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
            for operation in operations:
                if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                    continue  # nothing in it can be wrong

                @EXAMPLES
                @given(case=operation.as_strategy(generation_mode=mode))
                def send(case):
                    response = case.call(base_url=gateway.url)
                    assert response.status_code < 500, (case.path, case.body, response.status_code, response.text)
                    if response.status_code >= 400 and response.headers["content-type"] == "application/json":
                        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

                send()

    await loop.run_in_executor(None, send_all)
    await gateway.settled()
