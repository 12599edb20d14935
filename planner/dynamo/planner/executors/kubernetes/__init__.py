"""The scale of Deployments and StatefulSets, by the API server of Kubernetes.

| module | holds |
|---|---|
| `api` | the calls that are needed: an object's scale, the pods of an object |
| `executor` | decisions as numbers of replicas; pods that are to end are marked first |
| `service_account` | who this process is for the API server, read again when its files change |
"""
