"""FskvMultiConnector: several roots, or a root beside another connector, in one engine."""
