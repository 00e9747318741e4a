// Kubernetes in one binary: every component of a cluster behind its own name, which share most of their code.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"kube-apiserver":          serve(apiserver.NewAPIServerCommand),
	"kube-controller-manager": serve(controllermanager.NewControllerManagerCommand),
	"kube-proxy":              serve(proxy.NewProxyCommand),
	"kube-scheduler":          serve(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 serve(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kubectl":                 kubectl,
	"gpu-device-plugin":       devicePlugin,
	"volume-provisioner":      volumeProvisioner,
}

func serve(command func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(command())) }
}

func kubectl() {
	logs.GlogSetter(cmd.GetLogVerbosity(os.Args)) //nolint:errcheck // a wrong level is reported by the flag's own parser
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}

// The program is the name that this binary was called by, through a link, else the first argument.
func main() {
	name := filepath.Base(os.Args[0])
	if _, known := programs[name]; !known && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	program, known := programs[name]
	if !known {
		names := make([]string, 0, len(programs))
		for known := range programs {
			names = append(names, known)
		}
		sort.Strings(names)
		fmt.Fprintf(os.Stderr, "unknown program %q: expected one of %s\n", name, strings.Join(names, ", "))
		os.Exit(2)
	}
	program()
}
