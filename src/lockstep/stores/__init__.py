"""Object stores that an address names: `s3://` by boto3, every other scheme by fsspec."""
