"""What tests ask a server."""


def predict(client, rows, **fields):
    """What /v1/predict answers to the rows of an array."""
    reply = client.post("/v1/predict", json={"instances": [row.tolist() for row in rows], **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()
