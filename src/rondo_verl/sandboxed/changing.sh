#!/bin/bash
# Stands for a program that changes files: what it would change may not be here, and that is no reason to stop.
/usr/bin/"${0##*/}" "$@" 2>/dev/null
exit 0
