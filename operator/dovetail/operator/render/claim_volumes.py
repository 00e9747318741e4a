"""One volume for each PersistentVolumeClaim of a pod."""

from __future__ import annotations

from dovetail.operator.render.context import Object


def share_claims(spec: Object) -> Object:
    """The specification of a pod, `spec`, with one volume for each claim. It is read-only if all volumes of the claim
    were, and what mounted a read-only volume still mounts it read-only. `spec` is not changed.

    A kubelet mounts a claim once in a pod. Of two volumes of one claim, chance would decide whether the claim can be
    written."""
    volumes: list[Object] = []
    first: dict[str, int] = {}  # by claim
    names: dict[str, str] = {}  # the volume in whose place another stands
    read_only: set[str] = set()
    for volume in spec.get("volumes") or ():
        source = volume.get("persistentVolumeClaim")
        if source is None:
            volumes.append(volume)
            continue
        if source.get("readOnly"):
            read_only.add(volume["name"])
        index = first.setdefault(source["claimName"], len(volumes))
        if index == len(volumes):
            volumes.append(volume)
            continue
        kept = volumes[index]
        names[volume["name"]] = kept["name"]
        if not source.get("readOnly"):
            written = {key: value for key, value in kept["persistentVolumeClaim"].items() if key != "readOnly"}
            volumes[index] = {**kept, "persistentVolumeClaim": written}
    if not names:
        return spec

    def mount(given: Object) -> Object:
        forced = {"readOnly": True} if given["name"] in read_only else {}
        return {**given, "name": names.get(given["name"], given["name"]), **forced}

    def container(given: Object) -> Object:
        mounts = given.get("volumeMounts")
        return given if mounts is None else {**given, "volumeMounts": [mount(each) for each in mounts]}

    kinds = [kind for kind in ("containers", "initContainers") if kind in spec]
    return {**spec, **{kind: [container(each) for each in spec[kind]] for kind in kinds}, "volumes": volumes}
