"""Programs written for other servers, served as they are: modules of ours that answer to the names of theirs."""
