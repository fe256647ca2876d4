"""SGLang's HTTP interface: one server, many servers, requests, answers, retries."""
