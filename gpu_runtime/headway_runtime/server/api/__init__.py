"""The OpenAI API: request bodies in, response bodies out. Knows HTTP and JSON, not how a request is scheduled."""
