"""The contract of Tidemill: records, their Avro schemas, the topic catalogue, serialisers and client settings.

Everything else imports from here; this package imports nothing of Tidemill's own.
"""
