package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

// folders makes a folder for every claim. All nodes are on one machine, so pods on any of them share it: ReadWriteMany.
type folders struct{ root string }

func (f *folders) Provision(
	_ context.Context, options controller.ProvisionOptions,
) (*core.PersistentVolume, controller.ProvisioningState, error) {
	path := filepath.Join(f.root, options.PVName)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	// Not left to the umask: fsGroup does not apply to folders of the host, and pods are not root.
	if err := os.Chmod(path, 0o777); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	claim := options.PVC.Spec
	kind := core.HostPathDirectory
	return &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: options.PVName},
		Spec: core.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			AccessModes:                   claim.AccessModes,
			Capacity:                      core.ResourceList{core.ResourceStorage: claim.Resources.Requests[core.ResourceStorage]},
			PersistentVolumeSource: core.PersistentVolumeSource{
				HostPath: &core.HostPathVolumeSource{Path: path, Type: &kind},
			},
		},
	}, controller.ProvisioningFinished, nil
}

func (f *folders) Delete(_ context.Context, volume *core.PersistentVolume) error {
	return os.RemoveAll(filepath.Join(f.root, volume.Name))
}

func volumeProvisioner() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	root := flag.String("root", "", "folder for the volumes")
	name := flag.String("name", "dovetail.dev/folders", "the storage class's provisioner")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	provisioner := controller.NewProvisionController(
		stop, kubernetes.NewForConfigOrDie(config), *name, &folders{*root}, controller.LeaderElection(false))
	provisioner.Run(stop)
}
