// argocheck reads a JSON list of Argo objects on stdin and judges them as Argo itself does: no unknown field, and the
// validation that its controller runs before it starts a Workflow.  A line a mistake; exit code 1 when there is one.
//
// It is a program of the tests, built by .ci/tools against Argo's Go module.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"

	wfv1 "github.com/argoproj/argo-workflows/v3/pkg/apis/workflow/v1alpha1"
	"github.com/argoproj/argo-workflows/v3/workflow/validate"
)

type templates map[string]*wfv1.WorkflowTemplate

func (t templates) Get(name string) (*wfv1.WorkflowTemplate, error) {
	if found, ok := t[name]; ok {
		return found, nil
	}
	return nil, fmt.Errorf("no WorkflowTemplate %s", name)
}

type noClusterTemplates struct{}

func (noClusterTemplates) Get(name string) (*wfv1.ClusterWorkflowTemplate, error) {
	return nil, fmt.Errorf("no ClusterWorkflowTemplate %s", name)
}

func strict(data []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	return decoder.Decode(into)
}

func main() {
	var items []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&items); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	known := templates{}
	failed := false
	report := func(name string, err error) {
		if err != nil {
			failed = true
			fmt.Printf("%s: %v\n", name, err)
		}
	}
	type header struct {
		Kind     string
		Metadata struct{ Name string }
	}
	heads := make([]header, len(items))
	for i, item := range items {
		_ = json.Unmarshal(item, &heads[i])
		if heads[i].Kind == "WorkflowTemplate" {
			var template wfv1.WorkflowTemplate
			report(heads[i].Metadata.Name, strict(item, &template))
			known[template.Name] = &template
		}
	}
	for i, item := range items {
		name := heads[i].Kind + " " + heads[i].Metadata.Name
		switch heads[i].Kind {
		case "WorkflowTemplate":
			template := known[heads[i].Metadata.Name]
			report(name, validate.ValidateWorkflowTemplate(known, noClusterTemplates{}, template, nil, validate.ValidateOpts{}))
		case "Workflow":
			var workflow wfv1.Workflow
			report(name, strict(item, &workflow))
			report(name, validate.ValidateWorkflow(known, noClusterTemplates{}, &workflow, nil, validate.ValidateOpts{Submit: true}))
		case "CronWorkflow":
			var cron wfv1.CronWorkflow
			report(name, strict(item, &cron))
			report(name, validate.ValidateCronWorkflow(context.Background(), known, noClusterTemplates{}, &cron, nil))
		default:
			report(name, fmt.Errorf("no object of Argo"))
		}
	}
	if failed {
		os.Exit(1)
	}
}
