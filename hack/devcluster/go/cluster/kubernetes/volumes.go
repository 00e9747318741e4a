package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// folders makes a folder for every claim. All nodes are on one machine, so pods on any of them share it: ReadWriteMany.
type folders struct {
	client  kubernetes.Interface
	claims  listers.PersistentVolumeClaimLister
	volumes listers.PersistentVolumeLister
	root    string
	class   string
}

func volumeProvisioner() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	root := flag.String("root", "", "folder for the volumes")
	class := flag.String("class", "dovetail-dev", "the storage class whose claims are served")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	client := kubernetes.NewForConfigOrDie(config)
	watches := informers.NewSharedInformerFactory(client, 0)
	objects := watches.Core().V1()
	f := &folders{client, objects.PersistentVolumeClaims().Lister(), objects.PersistentVolumes().Lister(), *root, *class}
	watches.Start(stop.Done())
	watches.WaitForCacheSync(stop.Done())
	for stop.Err() == nil {
		if err := f.reconcile(stop); err != nil && stop.Err() == nil {
			log.Print(err)
		}
		select {
		case <-stop.Done():
		case <-time.After(300 * time.Millisecond):
		}
	}
}

// reconcile looks at what the watches last saw; what it did already, or too early, is refused by name and harmless.
func (f *folders) reconcile(ctx context.Context) error {
	claims, err := f.claims.List(labels.Everything())
	if err != nil {
		return err
	}
	for _, claim := range claims {
		class := claim.Spec.StorageClassName
		if class != nil && *class == f.class && claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil {
			if err := f.provision(ctx, claim); err != nil {
				return err
			}
		}
	}
	volumes, err := f.volumes.List(labels.Everything())
	if err != nil {
		return err
	}
	for _, volume := range volumes {
		if volume.Spec.StorageClassName == f.class && volume.Status.Phase == core.VolumeReleased {
			if err := f.remove(ctx, volume); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f *folders) provision(ctx context.Context, claim *core.PersistentVolumeClaim) error {
	name := "pvc-" + string(claim.UID)
	if _, err := f.volumes.Get(name); err == nil {
		return nil
	}
	path := filepath.Join(f.root, name)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	// Not left to the umask: fsGroup does not apply to folders of the host, and pods are not root.
	if err := os.Chmod(path, 0o777); err != nil {
		return err
	}
	kind := core.HostPathDirectory
	volume := &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: name},
		Spec: core.PersistentVolumeSpec{
			// The folder is removed here, not by the controller manager.
			PersistentVolumeReclaimPolicy: core.PersistentVolumeReclaimRetain,
			StorageClassName:              f.class,
			AccessModes:                   claim.Spec.AccessModes,
			Capacity: core.ResourceList{
				core.ResourceStorage: claim.Spec.Resources.Requests[core.ResourceStorage],
			},
			ClaimRef: &core.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			PersistentVolumeSource: core.PersistentVolumeSource{
				HostPath: &core.HostPathVolumeSource{Path: path, Type: &kind},
			},
		},
	}
	_, err := f.client.CoreV1().PersistentVolumes().Create(ctx, volume, meta.CreateOptions{})
	if errors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (f *folders) remove(ctx context.Context, volume *core.PersistentVolume) error {
	if err := os.RemoveAll(filepath.Join(f.root, volume.Name)); err != nil {
		return err
	}
	err := f.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, meta.DeleteOptions{})
	if errors.IsNotFound(err) {
		return nil
	}
	return err
}
