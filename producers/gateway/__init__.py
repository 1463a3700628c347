r"""The feedback gateway: what the feedback SDK does, over HTTP, for backends in any language.

Make the keys, and start it:

    export KEY=$(openssl rand -hex 32)
    export TIDEMILL_PRODUCT__SIGNING_KEYS="[\"$(openssl rand -hex 32)\"]"
    export TIDEMILL_PRODUCT__PSEUDONYM_KEY=$(openssl rand -hex 32)
    export TIDEMILL_GATEWAY__API_KEYS="{\"shop\": \"$(printf %s "$KEY" | sha256sum | cut -d ' ' -f 1)\"}"
    tidemill gateway --bootstrap kafka:9092 --port 8090

Send an event; `TOKEN` is the interaction token that the router, started with the same keys, returned with an answer:

    curl --fail-with-body http://127.0.0.1:8090/v1/feedback \
      -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \
      -d '{"interaction": "'"$TOKEN"'", "kind": "thumb", "value": 1, "user": "ann@example.com", "event_id": "click-1"}'

`/docs` shows the rest: batches, withdrawals, and what each refusal means.
"""
