"""Does a draft model fit a target? Compare tokenizers and configs of any format, without reading weights."""
