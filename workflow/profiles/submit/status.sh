#!/usr/bin/env bash
# One word for Snakemake: running, success or failed. Without accounting a job is known for MinJobAge (300 s) after its end.
for _ in 1 2 3; do # a busy slurmctld is no failed job
    if state=$(squeue --noheader --states=all --format=%T --jobs="$1" 2>&1); then break; fi
    [[ $state == *"Invalid job id"* ]] && { echo failed; exit; }
    state=unreachable; sleep 1
done
case $state in
    COMPLETED) echo success ;;
    BOOT_FAIL | CANCELLED | DEADLINE | FAILED | NODE_FAIL | OUT_OF_MEMORY | PREEMPTED | TIMEOUT | REVOKED | "") echo failed ;;
    *) echo running ;;
esac
