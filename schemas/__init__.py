"""The shared definitions of Tidemill: records, their Avro schemas, the topic catalogue, codecs and client settings.

All other packages import from here; this package imports no other package of Tidemill.
"""
