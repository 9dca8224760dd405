"""Object stores that an address names: S3, Google Cloud Storage and Azure, by obstore."""
